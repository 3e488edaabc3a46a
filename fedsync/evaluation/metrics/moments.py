"""Metrics that are means over samples, or follow from a few means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from fedsync.evaluation.metrics.metric_types import ArrayMetric, Interval, Metric, Statistic, Sums, Values, ratio
from fedsync.evaluation.metrics.resample import jackknife

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

    def left_out(self, sums: Sums) -> Sums:
        table = self.table(sums)
        there = np.flatnonzero(table[:, 0])
        without = np.repeat(table[None], len(there), axis=0)
        without[np.arange(len(there)), there] = 0.0
        return without.reshape(len(there), -1)

    def interval(self, sums: Sums, values: Values, seed: int) -> Interval | None:
        return jackknife(sums, self.left_out(sums), values)


ERRORS = BlockSums("errors", 5)
"""Of numbers that are predicted: errors, their squares, true numbers and their squares."""

OVERLAP = BlockSums("overlap", 3)
"""Of segmented samples: Dice coefficient and intersection over union."""

LIKELIHOOD = BlockSums("likelihood", 3)
"""Of sequences: predicted tokens, and minus their log-likelihood."""


@dataclass(frozen=True, slots=True)
class Mean(ArrayMetric[BlockSums]):
    """The mean of a number over samples.

    Args:
        column: of the statistic, the number's.
    """

    column: int = 1

    def values(self, sums: Sums) -> Sums:
        totals = self.statistic.totals(sums)
        return ratio(totals[..., self.column], totals[..., 0])


class Rmse(ArrayMetric[BlockSums]):
    """Root of the mean squared error."""

    __slots__ = ()

    def values(self, sums: Sums) -> Sums:
        totals = self.statistic.totals(sums)
        return np.sqrt(ratio(totals[..., 2], totals[..., 0]))


class R2(ArrayMetric[BlockSums]):
    """Coefficient of determination: 1 less squared errors over squared differences from the mean of all samples."""

    __slots__ = ()

    def values(self, sums: Sums) -> Sums:
        totals = self.statistic.totals(sums)
        count, squares, truth, own = (totals[..., column] for column in (0, 2, 3, 4))
        spread = own - ratio(truth * truth, count)
        # What rounding leaves of numbers that are all the same is no spread.
        return 1 - ratio(squares, np.where(spread > 1e-12 * own, spread, 0.0))


class Perplexity(ArrayMetric[BlockSums]):
    """``exp`` of the mean of minus the log-likelihood over all predicted tokens."""

    __slots__ = ()

    def values(self, sums: Sums) -> Sums:
        totals = self.statistic.totals(sums)
        return np.exp(ratio(totals[..., 2], totals[..., 1]))


def _nothing(*_: object) -> Any:
    raise NotImplementedError


@dataclass(frozen=True, slots=True)
class OwnMetric(Metric[BlockSums]):
    """A number of a user's own, from sums of numbers that each sample has; see `own`."""

    measure: Callable[..., Any] = _nothing
    formula: Callable[[Sums], float] = _nothing

    def value(self, sums: Sums) -> float | None:
        return self.formula(self.statistic.totals(sums))


def own(
    name: str,
    columns: int,
    measure: Callable[..., Any],
    formula: Callable[[Sums], float],
    *,
    higher_is_better: bool = True,
    limits: tuple[float, float] = (-inf, inf),
) -> OwnMetric:
    """A metric of one's own: numbers of each sample are summed over samples and silos, and a formula makes one of them.

    Args:
        name: of the metric; small letters, digits and ``_``.
        columns: numbers of a sample.
        measure: outputs and targets of a batch, as `Task.predict` gives them, to numbers, a tensor [samples, columns].
        formula: the metric, of float64 [1 + columns]: how many samples there are, and the sum of each number.
        higher_is_better: or lower.
        limits: between which it lies.
    """
    return OwnMetric(name, BlockSums(name, columns + 1), higher_is_better, limits, measure, formula)
