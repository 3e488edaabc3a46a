"""Metrics of a classifier's scores, from histograms of the scores of each class.

The score of a sample is the model's probability of a class. A histogram keeps only its bin, so scores in one bin count
as ties. A bin includes its upper end. Bins are ``1 / resolution`` wide. Only the lowest and the highest bin, where
confident models put most samples, are divided: edges approach 0 and 1 in geometric progression, ratio ``2 ** -0.25``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from fedsync.evaluation.metrics.metric_types import (
    ArrayMetric,
    Interval,
    Statistic,
    Sums,
    Values,
    bootstrap,
    flat,
    mean_of_known,
    ratio,
)

FINE, COARSE = 128, 32

GROUPS = 16
"""Equal spans of scores in which the calibration error compares mean score and class share."""


@cache
def edges(resolution: int) -> NDArray[np.float64]:
    """Return the increasing bin edges, float64 [2 * resolution - 1], for ``searchsorted(edges, score, "left")``."""
    spans = np.arange(1, resolution) / resolution
    tail: list[float] = []
    step = sqrt(sqrt(0.5))  # roots are exact to the last bit everywhere
    for _ in range(resolution // 2):
        tail.append((tail[-1] if tail else 1 / resolution) * step)
    low = np.array(tail[::-1])
    return np.concatenate([low, spans, 1 - low[::-1]])


@cache
def middles(resolution: int) -> NDArray[np.float64]:
    ends: NDArray[np.float64] = np.concatenate([[0.0], edges(resolution), [1.0]])
    return np.asarray((ends[1:] + ends[:-1]) / 2)


def total(values: Sums) -> Sums:
    return np.cumsum(values, axis=-1)[..., -1]


@dataclass(frozen=True, slots=True)
class ScoreCounts(Statistic):
    """Numbers of samples of each class in each score bin; ``resolution`` is a multiple of 16.

    Two classes: counts [2, bins] of the score of class 1, first for samples of class 0. More classes: [classes, 2,
    bins] of each class's score, first for samples of all other classes.
    """

    classes: int = 2
    resolution: int = FINE

    @property
    def bins(self) -> int:
        return 2 * self.resolution

    @property
    def shape(self) -> tuple[int, int, int]:
        return (1 if self.classes == 2 else self.classes), 2, self.bins

    @property
    def key(self) -> str:
        return f"scores/{self.bins}" + ("" if self.classes == 2 else f"/{self.classes}")

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    @property
    def places(self) -> int:
        return self.shape[0]

    def problem(self, sums: Sums) -> str:
        totals = self.table(sums).sum(axis=(-2, -1))
        return "" if (totals == totals[0]).all() else "histograms of different numbers of samples"

    def sides(self, sums: Sums) -> tuple[Sums, Sums]:
        """Return counts of all others and of the class, each [..., histograms, bins], of sums [..., size]."""
        table = self.table(sums)
        return table[..., 0, :], table[..., 1, :]

    def groups(self, sums: Sums) -> tuple[Sums, Sums, Sums]:
        """Return samples, samples of the class, and summed scores in `GROUPS` spans, each [..., histograms, GROUPS]."""
        others, own = self.sides(sums)
        middle = middles(self.resolution)
        first = np.searchsorted(middle, np.arange(GROUPS) / GROUPS)
        counts = others + own
        counts, own, scores = (np.add.reduceat(each, first, axis=-1) for each in (counts, own, counts * middle))
        return counts, own, scores

    def roc(self, sums: Sums, histogram: int = 0) -> list[tuple[float, float]]:
        """Return false and true positive rates of sums [size], (0, 0) to (1, 1); empty if a side has no samples."""
        others, own = (side[histogram, ::-1] for side in self.sides(sums))
        if not (others.sum() and own.sum()):
            return []
        there = (others + own) > 0
        wrong, right = (np.cumsum(side[there]) / side.sum() for side in (others, own))
        return [(0.0, 0.0), *zip(wrong.tolist(), right.tolist(), strict=True)]

    def interval(self, sums: Sums, values: Values, seed: int) -> Interval | None:
        """Return None for more than two classes: histograms do not tell which scores belong to one sample."""
        if self.classes > 2:
            return None
        return bootstrap(self.table(sums)[0], flat, values, seed)

    def table(self, sums: Sums) -> Sums:
        """Return counts [..., histograms, 2, bins] of sums [..., size]."""
        return sums.reshape(*sums.shape[:-1], *self.shape)

    def support(self, sums: Sums) -> Mapping[str, int]:
        sides = self.table(sums).sum(axis=-1)
        counts = sides[0] if self.classes == 2 else sides[:, 1]
        return {str(label): int(count) for label, count in enumerate(counts)}


class Auroc(ArrayMetric[ScoreCounts]):
    """Area under the ROC curve: how often a sample of the class scores above one of another class; ties count half.

    The error by binning is at most half the share of pairs in one bin. With more than two classes: the mean over
    classes with samples, each against the rest.
    """

    def values(self, sums: Sums) -> Sums:
        others, own = self.statistic.sides(sums)
        below = np.cumsum(others, axis=-1) - others
        pairs = total(own * (below + others / 2))
        return mean_of_known(ratio(pairs, own.sum(axis=-1) * others.sum(axis=-1)))


class AveragePrecision(ArrayMetric[ScoreCounts]):
    """Sum over thresholds of precision times gained recall, from the highest score down. With more than two classes:
    the mean over classes with samples, each against the rest.
    """

    def values(self, sums: Sums) -> Sums:
        others, own = (side[..., ::-1] for side in self.statistic.sides(sums))
        right, wrong = np.cumsum(own, axis=-1), np.cumsum(others, axis=-1)
        gained = np.where(own > 0, own * ratio(right, right + wrong), 0.0)
        return mean_of_known(ratio(total(gained), right[..., -1]))


class Brier(ArrayMetric[ScoreCounts]):
    """Mean squared difference between scores and truth, 0 or 1; with more than two classes, summed over classes. A
    score counts as the middle of its bin, so the error is below the largest bin's width.
    """

    def values(self, sums: Sums) -> Sums:
        others, own = self.statistic.sides(sums)
        middle = middles(self.statistic.resolution)
        squares = total(others * middle**2 + own * (1 - middle) ** 2)
        return np.cumsum(ratio(squares, (others + own).sum(axis=-1)), axis=-1)[..., -1]


class CalibrationError(ArrayMetric[ScoreCounts]):
    """Expected calibration error: mean of ``|mean score - share of the class|`` over `GROUPS` spans, by samples.

    A score counts as the middle of its bin, so the error is below half the largest bin's width. With more than two
    classes: the mean over classes.
    """

    resampled = False  # drawn samples differ more from the scores than the samples themselves

    def values(self, sums: Sums) -> Sums:
        counts, own, scores = self.statistic.groups(sums)
        return mean_of_known(ratio(total(np.abs(own - scores)), counts.sum(axis=-1)))
