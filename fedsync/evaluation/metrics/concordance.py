"""Harrell's concordance index: the share of sample pairs in which the sample at higher risk has the earlier event.

A pair is comparable if its order is known: the earlier time ends with an event, or both times are equal and one ends
with an event. Pairs are formed within a silo, since samples of two silos never meet. So the pooled number covers all
comparable pairs within silos, with equal weight: the mean of the silos' numbers, weighted by their comparable pairs. It
differs from the concordance of all samples together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedsync.evaluation.metrics.metric_types import ArrayMetric, Interval, Statistic, Sums, Values, ratio
from fedsync.evaluation.metrics.moments import BLOCKS
from fedsync.evaluation.metrics.resample import jackknife


@dataclass(frozen=True, slots=True)
class PairCounts(Statistic):
    """Samples, comparable pairs, concordant pairs and pairs of equal risk, [1 + BLOCKS, 4].

    The first row counts all samples. Each other row counts one group: its samples, and the pairs with a sample of the
    group.
    """

    key = f"pairs/{BLOCKS}"
    size = (1 + BLOCKS) * 4

    def problem(self, sums: Sums) -> str:
        table = self.table(sums)
        fits = (table[:, 2] + table[:, 3] <= table[:, 1]).all() and (table[1:] <= table[0]).all()
        return "" if fits and table[1:, 0].sum() == table[0, 0] else "pairs that do not fit the samples"

    def table(self, sums: Sums) -> Sums:
        """Return counts [..., 1 + BLOCKS, 4] of sums [..., size]."""
        return sums.reshape(*sums.shape[:-1], 1 + BLOCKS, 4)

    def support(self, sums: Sums) -> Mapping[str, int]:
        samples, pairs = self.table(sums)[0, :2]
        return {"samples": int(samples), "pairs": int(pairs)}

    def left_out(self, sums: Sums) -> Sums:
        table = self.table(sums)
        there = 1 + np.flatnonzero(table[1:, 0])
        without = np.zeros((len(there), *table.shape))
        without[:, 0] = table[0] - table[there]
        return without.reshape(len(there), -1)

    def interval(self, sums: Sums, values: Values, seed: int) -> Interval | None:
        return jackknife(sums, self.left_out(sums), values)


class Concordance(ArrayMetric[PairCounts]):
    """Share of concordant pairs among comparable pairs; pairs of equal risk count half."""

    __slots__ = ()

    def values(self, sums: Sums) -> Sums:
        whole = self.statistic.table(sums)[..., 0, :]
        return ratio(whole[..., 2] + whole[..., 3] / 2, whole[..., 1])
