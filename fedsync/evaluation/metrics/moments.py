"""Metrics that are means over samples, or functions of a few means, and Harrell's concordance index."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from fedsync.common.errors import ConfigError
from fedsync.evaluation.metrics.metric_types import ArrayMetric, Metric, Statistic, Sums, ratio

BLOCKS = 16
"""Groups to which a silo's samples are dealt in turn; intervals result from leaving out one group at a time."""


@dataclass(frozen=True, slots=True)
class BlockSums(Statistic):
    """Sums of ``columns`` numbers of each sample, [BLOCKS, columns]; the first column counts samples."""

    measured: str
    columns: int = 2

    whole = False

    @property
    def key(self) -> str:
        return f"{self.measured}/{BLOCKS}"

    @property
    def size(self) -> int:
        return BLOCKS * self.columns

    def problem(self, sums: Sums) -> str:
        counts = self.table(sums)[:, 0]
        return "" if ((counts >= 0) & (counts == np.floor(counts))).all() else "counts that are none"

    def table(self, sums: Sums) -> Sums:
        return sums.reshape(*sums.shape[:-1], BLOCKS, self.columns)

    def totals(self, sums: Sums) -> Sums:
        return np.cumsum(self.table(sums), axis=-2)[..., -1, :]

    def support(self, sums: Sums) -> Mapping[str, int]:
        return {"samples": int(self.totals(sums)[0])}

    def left_out(self, sums: Sums) -> Sums:
        table = self.table(sums)
        there = np.flatnonzero(table[:, 0])
        without = np.repeat(table[None], len(there), axis=0)
        without[np.arange(len(there)), there] = 0.0
        return without.reshape(len(there), self.size)


ERRORS = BlockSums("errors", 5)
"""Columns after the count: absolute errors, squared errors, true values, squared true values."""

OVERLAP = BlockSums("overlap", 3)
"""Columns after the count: Dice coefficient, intersection over union of a segmented sample."""

LIKELIHOOD = BlockSums("likelihood", 3)
"""Columns after the count: predicted tokens of a sequence, negative log-likelihood."""


@dataclass(frozen=True, slots=True)
class Mean(ArrayMetric[BlockSums]):
    """Mean over samples of the number in ``column``."""

    column: int = 1

    def values(self, sums: Sums) -> Sums:
        totals = self.statistic.totals(sums)
        return ratio(totals[..., self.column], totals[..., 0])


class Rmse(ArrayMetric[BlockSums]):
    """Root mean squared error."""

    def values(self, sums: Sums) -> Sums:
        totals = self.statistic.totals(sums)
        return np.sqrt(ratio(totals[..., 2], totals[..., 0]))


class R2(ArrayMetric[BlockSums]):
    """Coefficient of determination: 1 minus squared errors over squared deviations from the mean of all samples.
    Undefined for several targets.
    """

    def values(self, sums: Sums) -> Sums:
        totals = self.statistic.totals(sums)
        count, squares, truth, own = (totals[..., column] for column in (0, 2, 3, 4))
        spread = own - ratio(truth * truth, count)
        # Equal numbers leave a tiny spread by rounding, which must count as 0.
        return 1 - ratio(squares, np.where(spread > 1e-12 * own, spread, 0.0))


class Perplexity(ArrayMetric[BlockSums]):
    """``exp`` of the mean negative log-likelihood over all predicted tokens."""

    def values(self, sums: Sums) -> Sums:
        totals = self.statistic.totals(sums)
        return np.exp(ratio(totals[..., 2], totals[..., 1]))


def _nothing(*_: object) -> Any:
    raise NotImplementedError


@dataclass(frozen=True, slots=True)
class OwnMetric(Metric[BlockSums]):
    """User-defined metric, from sums of numbers of each sample; see `own`."""

    measure: Callable[..., Any] = _nothing
    formula: Callable[[Sums], float] = _nothing

    def value(self, sums: Sums) -> float | None:
        return self.formula(self.statistic.totals(sums))

    def check(self) -> None:
        """Raise `ConfigError` if the formula gives no number for sums of ones; None or an arithmetic error is valid."""
        try:
            with np.errstate(all="ignore"):
                found = self.formula(np.ones(self.statistic.columns))
                float(0.0 if found is None else found)
        except (ArithmeticError, ValueError):
            pass
        except Exception as error:
            problem = f"its formula fails on sums of ones: {type(error).__name__}: {error}"
            raise ConfigError(self.name, problem, "Return a number from [samples, first sum, ...]") from error


def own(
    name: str,
    columns: int,
    measure: Callable[..., Any],
    formula: Callable[[Sums], float],
    *,
    higher_is_better: bool = True,
    limits: tuple[float, float] = (-inf, inf),
) -> OwnMetric:
    """Build a user-defined metric: numbers of each sample are summed over samples and silos, then passed to a formula.

    Args:
        name: name of the metric; lower-case letters, digits and ``_``.
        columns: numbers of a sample.
        measure: maps outputs and targets of a batch, as `Task.predict` gives them, to a tensor [samples, columns].
        formula: maps float64 [1 + columns], the number of samples and the sum of each number, to the metric.
        limits: range of its values.
    """
    return OwnMetric(name, BlockSums(name, columns + 1), higher_is_better, limits, measure, formula)


@dataclass(frozen=True, slots=True)
class PairCounts(Statistic):
    """Samples, comparable pairs, concordant pairs and pairs of equal risk, [1 + BLOCKS, 4].

    The first row counts all samples. Each other row counts one group: its samples, and the pairs with a sample of the
    group. A pair is comparable if its order is known: the earlier time ends with an event, or both times are equal and
    one ends with an event. Samples of two silos never meet, so pairs are formed within a silo, and the pooled number is
    the mean of the silos' numbers, weighted by their comparable pairs: not the concordance of all samples together.
    """

    key = f"pairs/{BLOCKS}"
    size = (1 + BLOCKS) * 4

    def problem(self, sums: Sums) -> str:
        table = self.table(sums)
        fits = (table[:, 2] + table[:, 3] <= table[:, 1]).all() and (table[1:] <= table[0]).all()
        return "" if fits and table[1:, 0].sum() == table[0, 0] else "pairs that do not fit the samples"

    def table(self, sums: Sums) -> Sums:
        return sums.reshape(*sums.shape[:-1], 1 + BLOCKS, 4)

    def support(self, sums: Sums) -> Mapping[str, int]:
        return {"samples": int(self.table(sums)[0, 0])}

    def left_out(self, sums: Sums) -> Sums:
        table = self.table(sums)
        there = 1 + np.flatnonzero(table[1:, 0])
        without = np.zeros((len(there), *table.shape))
        without[:, 0] = table[0] - table[there]
        return without.reshape(len(there), self.size)


class Concordance(ArrayMetric[PairCounts]):
    """Harrell's concordance index: share of concordant pairs among comparable pairs; pairs of equal risk count half."""

    def values(self, sums: Sums) -> Sums:
        whole = self.statistic.table(sums)[..., 0, :]
        return ratio(whole[..., 2] + whole[..., 3] / 2, whole[..., 1])
