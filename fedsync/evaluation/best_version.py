"""Selection of the best model version, which is kept because later training may spoil the model.

A version is judged once, when its score settles (`fedsync.evaluation.version_scores`), by the silos' validation splits.
Only a strictly better version replaces the best, so the first of equal versions stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

import numpy as np

from fedsync.core.orders import Evaluation, Score
from fedsync.evaluation.metrics.metric_types import AnyMetric, number
from fedsync.evaluation.version_scores import standing_in

Numbers = Mapping[str, float]
"""Metric name -> value; a metric that could not be computed is absent."""

Judge = Callable[[Numbers, Mapping[str, Numbers]], float]
"""User-defined rule: maps the pooled numbers and each silo's numbers to one number, of which more is better."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Rule that rates a version by one number: the pooled metric, the worst silo's, or the result of a user's rule."""

    metric: str = "accuracy"
    higher: bool = True
    by: Literal["pooled", "worst"] | Judge = "pooled"

    def value(self, score: Score, found: Mapping[str, Evaluation], metrics: Sequence[AnyMetric]) -> float | None:
        """Return the finite rating; None if the metric is not reported or could not be computed.

        ``found`` holds the pooled evaluations by silo; it is empty if the figures of single silos are sealed.
        """
        if self.by == "pooled":
            value = self._of(score.numbers)
        elif self.by == "worst":
            only = [metric for metric in metrics if metric.name == self.metric]
            values = [self._of(numbers_of(each, only)) for each in found.values()]
            told = [each for each in values if each is not None]
            value = (min if self.higher else max)(told) if told else None
        else:
            value = float(self.by(score.numbers, {name: numbers_of(each, metrics) for name, each in found.items()}))
        return value if value is not None and isfinite(value) else None

    def _of(self, numbers: Numbers) -> float | None:
        return standing_in(numbers) if self.metric == "accuracy" else numbers.get(self.metric)


def stated(score: Score, value: float | None) -> dict[str, Any]:
    return {"version": score.version, "value": value, "metrics": dict(score.numbers)}


def numbers_of(evaluation: Evaluation, metrics: Iterable[AnyMetric]) -> Numbers:
    """Return one silo's values by metric name, in the form of `Score.numbers`."""
    worked_out = {
        metric.name: number(metric, np.array(evaluation.sums[metric.statistic.key]))
        for metric in metrics
        if metric.statistic.key in evaluation.sums
    }
    told = {name: value for name, value in worked_out.items() if value is not None}
    means = {
        name: total / evaluation.samples
        for name, total in (("accuracy", evaluation.correct), ("loss", evaluation.loss))
        if total is not None and evaluation.samples
    }
    return {**means, **told, **means}  # means win: a custom task's score stands under its name, as in `Score.numbers`


@dataclass(frozen=True, slots=True)
class Leader:
    """Best version by one rule: its score (None before the first), its rating, and the versions judged since then."""

    score: Score | None = None
    value: float = 0.0
    since: int = 0

    @property
    def version(self) -> int:
        """Model version; -1 before the first."""
        return -1 if self.score is None else self.score.version

    def after(
        self, rule: Selection, score: Score, found: Mapping[str, Evaluation], metrics: Sequence[AnyMetric]
    ) -> Leader:
        """Return the leader after one more judged version; arguments as in `Selection.value`."""
        value = rule.value(score, found, metrics)
        if value is None:
            return self
        if self.score is None or (value > self.value if rule.higher else value < self.value):
            return Leader(score, value)
        return Leader(self.score, self.value, self.since + 1)

    def told(self, rule: Selection, best: Score) -> Leader:
        """Return the version ``best`` that silos keep: under sealed figures they decide themselves, by ``rule``."""
        return self if best.version == self.version else Leader(best, rule.value(best, {}, ()) or 0.0)
