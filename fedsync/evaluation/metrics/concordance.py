"""Harrell's concordance of risks with what happened: how often of two samples the one at higher risk is the first.

Two samples are comparable if it is known which was first: the earlier one's time ends with its event, or both times are
the same and one ends with an event. Pairs are formed within a silo, for the samples of two silos are nowhere together.
So the pooled number is that of all comparable pairs within silos, each pair counting alike: the mean of the silos'
numbers, weighted by their comparable pairs. It is not the number of all samples put together.
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
    """Samples, comparable pairs, pairs in order and pairs at one risk, [1 + BLOCKS, 4].

    First of all samples, then of each group of samples: its samples, and the pairs that have one of them.
    """

    @property
    def key(self) -> str:
        return f"pairs/{BLOCKS}"

    @property
    def size(self) -> int:
        return (1 + BLOCKS) * 4

    def problem(self, sums: Sums) -> str:
        table = self.table(sums)
        fits = (table[:, 2] + table[:, 3] <= table[:, 1]).all() and (table[1:] <= table[0]).all()
        return "" if fits and table[1:, 0].sum() == table[0, 0] else "pairs that do not fit the samples"

    def table(self, sums: Sums) -> Sums:
        """Counts [..., 1 + BLOCKS, 4] of sums [..., size]."""
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
    """Share of comparable pairs that are in order, those at one risk counting half."""

    __slots__ = ()

    def values(self, sums: Sums) -> Sums:
        whole = self.statistic.table(sums)[..., 0, :]
        return ratio(whole[..., 2] + whole[..., 3] / 2, whole[..., 1])
