"""Metrics of a classifier's scores, from histograms of the scores of each class.

The score of a sample is the probability that the model gives a class. A histogram keeps of it in which bin it lies, so
a number is that of samples whose scores are rounded to their bins: scores in one bin count as ties. A bin holds its
upper end. Bins are ``1 / resolution`` wide, except in the first and the last such span: there, where confident models
put most samples, they follow a geometric progression towards 0 and towards 1, each end ``2 ** -0.25`` of the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from fedsync.core.metrics.base import ArrayMetric, Statistic, Sums, ratio


@cache
def edges(resolution: int) -> NDArray[np.float64]:
    """Ends between the bins, float64 [2 * resolution - 1], increasing: for ``searchsorted(edges, score, "left")``."""
    spans = np.arange(1, resolution) / resolution
    tail: list[float] = []
    step = sqrt(sqrt(0.5))  # roots are exact to the last bit everywhere
    for _ in range(resolution // 2):
        tail.append((tail[-1] if tail else 1 / resolution) * step)
    low = np.array(tail[::-1])
    return np.concatenate([low, spans, 1 - low[::-1]])


@dataclass(frozen=True, slots=True)
class ScoreCounts(Statistic):
    """How many samples of each class have scores in each bin.

    Two classes: counts [2, bins] of the score of class 1, those of samples of class 0 first. More classes: [classes,
    2, bins], of each class's score, those of samples of all others first.

    Args:
        classes: at least 2.
        resolution: a multiple of 16; there are ``2 * resolution`` bins.
    """

    classes: int = 2
    resolution: int = 128

    @property
    def bins(self) -> int:
        return 2 * self.resolution

    @property
    def shape(self) -> tuple[int, int, int]:
        """Histograms of one class against the rest, the two sides of each, bins."""
        return (1 if self.classes == 2 else self.classes), 2, self.bins

    @property
    def key(self) -> str:
        return f"scores/{self.bins}" + ("" if self.classes == 2 else f"/{self.classes}")

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    def problem(self, sums: Sums) -> str:
        totals = self.table(sums).sum(axis=(-2, -1))
        return "" if (totals == totals[0]).all() else "histograms of different numbers of samples"

    def table(self, sums: Sums) -> Sums:
        """Counts [..., histograms, 2, bins] of sums [..., size]."""
        return sums.reshape(*sums.shape[:-1], *self.shape)

    def support(self, sums: Sums) -> Mapping[str, int]:
        sides = self.table(sums).sum(axis=-1)
        counts = sides[0] if self.classes == 2 else sides[:, 1]
        return {str(label): int(count) for label, count in enumerate(counts)}


@dataclass(frozen=True, slots=True)
class Auroc(ArrayMetric):
    """Area under the ROC curve: how often a sample of the class scores above one of the others, ties counting half.

    The share of pairs within one bin, half of it, bounds what the bins change. Of several classes the mean over those
    that have samples, each against the rest.
    """

    statistic: ScoreCounts = ScoreCounts()

    @property
    def name(self) -> str:
        return "auroc"

    def values(self, sums: Sums) -> Sums:
        table = self.statistic.table(sums)
        others, own = table[..., 0, :], table[..., 1, :]
        below = np.cumsum(others, axis=-1) - others
        pairs = (own * (below + others / 2)).cumsum(axis=-1)[..., -1]
        return mean_of_known(ratio(pairs, own.sum(axis=-1) * others.sum(axis=-1)))


def mean_of_known(values: Sums) -> Sums:
    """Mean over the last axis of what is not NaN; NaN where all is."""
    known = ~np.isnan(values)
    return ratio(np.cumsum(np.where(known, values, 0.0), axis=-1)[..., -1], known.sum(axis=-1).astype(np.float64))
