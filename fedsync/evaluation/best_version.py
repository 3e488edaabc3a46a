"""Which version of the model is the best so far: the one that is kept when training goes on, and may spoil it.

A version is judged once, when its score settles (`fedsync.evaluation.version_scores`), by what silos found on their validation
splits. Only a version that surpasses the best takes its place, so of equals the first stays.
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
"""Value of each metric by its name; one that could not be worked out is absent."""

Judge = Callable[[Numbers, Mapping[str, Numbers]], float]
"""A user's rule: the pooled numbers, and those of each silo by its name, to one number, of which more is better."""


@dataclass(frozen=True, slots=True)
class Selection:
    """How good a version is, as one number.

    Args:
        metric: by which it is judged; not looked at by a user's rule.
        higher: more is better.
        by: the pooled number, that of the silo where it is worst, or a user's rule.
    """

    metric: str = "accuracy"
    higher: bool = True
    by: Literal["pooled", "worst"] | Judge = "pooled"

    def value(self, score: Score, found: Mapping[str, Evaluation], metrics: Sequence[AnyMetric]) -> float | None:
        """The number, finite; None where the metric was not told or could not be worked out.

        Args:
            score: of the version.
            found: what each silo found that is in the score; nothing where single silos are sealed.
            metrics: of the run.
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
    """What ``best.json`` says of a version, and of its value by the rule."""
    return {"version": score.version, "value": value, "metrics": dict(score.numbers)}


def numbers_of(evaluation: Evaluation, metrics: Iterable[AnyMetric]) -> Numbers:
    """What one silo found, by name: as `Score.numbers`, of the silo alone."""
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
    return {**means, **told, **means}  # the score of a task of its own stands under its name, as in `Score.numbers`


@dataclass(frozen=True, slots=True)
class Leader:
    """The best version so far by one rule.

    Args:
        score: of the version; None before there is one.
        value: of the version, by the rule.
        since: versions judged since then.
    """

    score: Score | None = None
    value: float = 0.0
    since: int = 0

    @property
    def version(self) -> int:
        """Of the model; -1 before there is one."""
        return -1 if self.score is None else self.score.version

    def after(
        self, rule: Selection, score: Score, found: Mapping[str, Evaluation], metrics: Sequence[AnyMetric]
    ) -> Leader:
        """The best once another version was judged; arguments as `Selection.value`'s."""
        value = rule.value(score, found, metrics)
        if value is None:
            return self
        if self.score is None or (value > self.value if rule.higher else value < self.value):
            return Leader(score, value)
        return Leader(self.score, self.value, self.since + 1)

    def told(self, rule: Selection, best: Score) -> Leader:
        """What silos keep as the best, where they decide by themselves, for their figures are sealed.

        Args:
            rule: by which they do.
            best: score of the version that they keep.
        """
        return self if best.version == self.version else Leader(best, rule.value(best, {}, ()) or 0.0)
