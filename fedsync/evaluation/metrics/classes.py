"""Metrics of predicted classes against true classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

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

MOST_CONFUSED = 32
"""Largest number of classes with a full confusion matrix."""


@dataclass(frozen=True)
class ClassCounts(Statistic):
    """Predictions by class: a confusion matrix [classes, classes], with true classes as rows. Beyond `MOST_CONFUSED`
    classes it is [3, classes]: right predictions, predictions and samples of each class.
    """

    classes: int

    @cached_property
    def full(self) -> bool:
        return self.classes <= MOST_CONFUSED

    @cached_property
    def shape(self) -> tuple[int, int]:
        return (self.classes if self.full else 3), self.classes

    @cached_property
    def key(self) -> str:
        return f"{'confusion' if self.full else 'classes'}/{self.classes}"

    @cached_property
    def size(self) -> int:
        return self.shape[0] * self.shape[1]

    def margins(self, sums: Sums) -> tuple[Sums, Sums, Sums]:
        """Return right predictions, predictions and samples of each class, each [..., classes], of sums [..., size]."""
        table = sums.reshape(*sums.shape[:-1], *self.shape)
        if not self.full:
            return table[..., 0, :], table[..., 1, :], table[..., 2, :]
        return np.diagonal(table, axis1=-2, axis2=-1), table.sum(axis=-2), table.sum(axis=-1)

    @cached_property
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
        # The true class of a wrong prediction is unknown: wrong predictions are drawn from all other samples.
        wrong, others = predicted - right, samples.sum() - samples
        strata = np.stack([np.stack([right, samples - right], 1), np.stack([wrong, others - wrong], 1)], 1)

        def rebuilt(drawn: NDArray[np.int64]) -> NDArray[Any]:
            hits, misses = drawn[:, 0::2, 0], drawn[:, 1::2, 0]
            return np.concatenate([hits, hits + misses, np.broadcast_to(samples, hits.shape)], axis=1)

        return bootstrap(strata.reshape(-1, 2), rebuilt, values, seed)


class Accuracy(ArrayMetric[ClassCounts]):
    """Share of right predictions."""

    def values(self, sums: Sums) -> Sums:
        right, _, samples = self.statistic.margins(sums)
        return ratio(right.sum(axis=-1), samples.sum(axis=-1))


class BalancedAccuracy(ArrayMetric[ClassCounts]):
    """Mean over classes of the share of right predictions; classes without samples are skipped."""

    def values(self, sums: Sums) -> Sums:
        right, _, samples = self.statistic.margins(sums)
        return mean_of_known(ratio(right, samples))


@dataclass(frozen=True, slots=True)
class Recall(ArrayMetric[ClassCounts]):
    """Share of right predictions in class ``label``: the sensitivity for 1, the specificity for 0."""

    label: int = 1

    def values(self, sums: Sums) -> Sums:
        right, _, samples = self.statistic.margins(sums)
        return ratio(right[..., self.label], samples[..., self.label])


@dataclass(frozen=True, slots=True)
class F1(ArrayMetric[ClassCounts]):
    """Harmonic mean of precision and recall, ``2 right / (predicted + samples)``. With ``macro`` it is the mean over
    classes with samples or predictions; else the value of class 1 of two.
    """

    macro: bool = True

    def values(self, sums: Sums) -> Sums:
        right, predicted, samples = self.statistic.margins(sums)
        each = ratio(2 * right, predicted + samples)
        return mean_of_known(each) if self.macro else each[..., 1]
