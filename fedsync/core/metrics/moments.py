"""Metrics that are means over samples, or follow from a few means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedsync.core.metrics.base import ArrayMetric, Statistic, Sums, ratio

BLOCKS = 16
"""Groups that the samples of a silo are dealt to in turn; intervals follow from leaving each out."""


@dataclass(frozen=True, slots=True)
class BlockSums(Statistic):
    """Sums of a few numbers of each sample, [BLOCKS, columns]; the first column counts samples.

    Args:
        measured: what the numbers are; part of the key.
        columns: how many, with the count.
    """

    measured: str
    columns: int = 2

    @property
    def key(self) -> str:
        return f"{self.measured}/{BLOCKS}"

    @property
    def size(self) -> int:
        return BLOCKS * self.columns

    @property
    def whole(self) -> bool:
        return False

    def problem(self, sums: Sums) -> str:
        counts = self.table(sums)[:, 0]
        return "" if ((counts >= 0) & (counts == np.floor(counts))).all() else "counts that are none"

    def table(self, sums: Sums) -> Sums:
        """Sums [..., BLOCKS, columns] of sums [..., size]."""
        return sums.reshape(*sums.shape[:-1], BLOCKS, self.columns)

    def totals(self, sums: Sums) -> Sums:
        """Sums over all samples, [..., columns]."""
        return np.cumsum(self.table(sums), axis=-2)[..., -1, :]

    def support(self, sums: Sums) -> Mapping[str, int]:
        return {"samples": int(self.totals(sums)[0])}


@dataclass(frozen=True, slots=True)
class Mean(ArrayMetric):
    """The mean of a number over samples.

    Args:
        measured: the number's name, and the metric's.
        more_is_better: whether more is better.
    """

    measured: str
    more_is_better: bool = True

    @property
    def name(self) -> str:
        return self.measured

    @property
    def statistic(self) -> BlockSums:
        return BlockSums(self.measured)

    @property
    def higher_is_better(self) -> bool:
        return self.more_is_better

    def values(self, sums: Sums) -> Sums:
        totals = self.statistic.totals(sums)
        return ratio(totals[..., 1], totals[..., 0])
