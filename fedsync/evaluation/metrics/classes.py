"""Metrics of which class was predicted for samples of which class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsync.evaluation.metrics.metric_types import ArrayMetric, Interval, Statistic, Sums, Values, mean_of_known, ratio
from fedsync.evaluation.metrics.resample import bootstrap, flat

MOST_CONFUSED = 32
"""Classes up to which a whole confusion matrix is kept."""


@dataclass(frozen=True, slots=True)
class ClassCounts(Statistic):
    """Predictions by class: a confusion matrix [classes, classes], rows being true; of many classes less.

    Then it is [3, classes]: how many of a class are predicted rightly, how often it is predicted, how many it has.
    """

    classes: int

    @property
    def full(self) -> bool:
        """Whether the sums are a confusion matrix."""
        return self.classes <= MOST_CONFUSED

    @property
    def shape(self) -> tuple[int, int]:
        return (self.classes if self.full else 3), self.classes

    @property
    def key(self) -> str:
        return f"{'confusion' if self.full else 'classes'}/{self.classes}"

    @property
    def size(self) -> int:
        return self.shape[0] * self.shape[1]

    def margins(self, sums: Sums) -> tuple[Sums, Sums, Sums]:
        """Right predictions, predictions and samples of each class, each [..., classes], of sums [..., size]."""
        table = sums.reshape(*sums.shape[:-1], *self.shape)
        if not self.full:
            return table[..., 0, :], table[..., 1, :], table[..., 2, :]
        return np.diagonal(table, axis1=-2, axis2=-1), table.sum(axis=-2), table.sum(axis=-1)

    @property
    def places(self) -> int:
        return 1 if self.full else 3

    def problem(self, sums: Sums) -> str:
        right, predicted, samples = self.margins(sums)
        fits = (right <= predicted).all() and (right <= samples).all() and predicted.sum() == samples.sum()
        return "" if fits else "predictions that do not fit the samples"

    def support(self, sums: Sums) -> Mapping[str, int]:
        return {str(label): int(count) for label, count in enumerate(self.margins(sums)[2])}

    def interval(self, sums: Sums, values: Values, seed: int) -> Interval | None:
        if self.full:
            return bootstrap(sums.reshape(self.shape), flat, values, seed)
        right, predicted, samples = self.margins(sums)
        # Which of the other classes a wrong prediction comes from is not known: its number is drawn of all of them.
        wrong, others = predicted - right, samples.sum() - samples
        strata = np.stack([np.stack([right, samples - right], 1), np.stack([wrong, others - wrong], 1)], 1)

        def rebuilt(drawn: NDArray[np.int64]) -> NDArray[Any]:
            hits, misses = drawn[:, 0::2, 0], drawn[:, 1::2, 0]
            return np.concatenate([hits, hits + misses, np.broadcast_to(samples, hits.shape)], axis=1)

        return bootstrap(strata.reshape(-1, 2), rebuilt, values, seed)


class Accuracy(ArrayMetric[ClassCounts]):
    """Share of right predictions."""

    __slots__ = ()

    def values(self, sums: Sums) -> Sums:
        right, _, samples = self.statistic.margins(sums)
        return ratio(right.sum(axis=-1), samples.sum(axis=-1))


class BalancedAccuracy(ArrayMetric[ClassCounts]):
    """Mean over classes of the share of their samples that is predicted rightly, without those that have none."""

    __slots__ = ()

    def values(self, sums: Sums) -> Sums:
        right, _, samples = self.statistic.margins(sums)
        return mean_of_known(ratio(right, samples))


@dataclass(frozen=True, slots=True)
class Recall(ArrayMetric[ClassCounts]):
    """Share of one class's samples that is predicted rightly.

    Args:
        label: 1, which makes it the sensitivity, or 0, the specificity.
    """

    label: int = 1

    def values(self, sums: Sums) -> Sums:
        right, _, samples = self.statistic.margins(sums)
        return ratio(right[..., self.label], samples[..., self.label])


@dataclass(frozen=True, slots=True)
class F1(ArrayMetric[ClassCounts]):
    """Harmonic mean of precision and recall, ``2 right / (predicted + samples)``.

    Args:
        macro: the mean over classes that are there or predicted; else that of class 1, of two.
    """

    macro: bool = True

    def values(self, sums: Sums) -> Sums:
        right, predicted, samples = self.statistic.margins(sums)
        each = ratio(2 * right, predicted + samples)
        return mean_of_known(each) if self.macro else each[..., 1]
