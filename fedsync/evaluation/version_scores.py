"""Scores of model versions, pooled over silos' evaluations during training, and the choice of the best version."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite, isnan
from typing import Any, Literal

import numpy as np

from fedsync.common.errors import UserCodeError
from fedsync.core.orders import Evaluation, Score
from fedsync.evaluation.metrics.metric_types import AnyMetric, ExactSum, Statistic, SumsPool, number, statistics_of

_FIRST = -2
"""Stands for the version that a silo evaluated last, until it has finished an order."""


def standing_in(numbers: Mapping[str, float]) -> float | None:
    """Return the accuracy or, if silos report none, minus the loss, so that more is better."""
    value = numbers.get("accuracy")
    return -numbers["loss"] if value is None and "loss" in numbers else value


@dataclass(slots=True)
class _Pool:
    """Sums over the evaluations of several silos, and the number of pending evaluations."""

    under_way: int = 0
    found: dict[str, Evaluation] = field(default_factory=dict)
    loss: ExactSum = field(default_factory=ExactSum)
    correct: ExactSum = field(default_factory=ExactSum)
    samples: int = 0
    with_loss: int = 0
    with_score: int = 0
    """Number of samples with a reported loss (``with_loss``) and with a reported score."""
    sums: SumsPool = field(default_factory=SumsPool)

    @property
    def score(self) -> tuple[float | None, float | None]:
        score = self.correct.value / self.with_score if self.with_score else None
        return score, self.loss.value / self.with_loss if self.with_loss else None

    def add(self, evaluation: Evaluation, known: Mapping[str, Statistic], times: int = 1) -> None:
        if evaluation.loss is not None:
            self.loss.add(evaluation.loss, times)
            self.with_loss += times * evaluation.samples
        if evaluation.correct is not None:
            self.correct.add(evaluation.correct, times)
            self.with_score += times * evaluation.samples
        self.samples += times * evaluation.samples
        self.sums.add(evaluation.sums, known, times)


@dataclass(frozen=True, slots=True)
class Settled:
    """Pooled score of a version without pending evaluations, and the evaluations by silo, which may change later."""

    score: Score
    found: Mapping[str, Evaluation]
    counts: bool = True
    """Whether enough silos scored the version for decisions; see `Scores`."""


@dataclass(slots=True)
class Scores:
    """Pool of evaluations by version, with the best score. Every method takes O(1) for a silo or a version.

    Silos evaluate the model of an order before they train on it. So version v is evaluated by the orders based on v,
    and is settled once none of these orders is running.

    Under a synchronous barrier all silos evaluate each version, and its score pools these evaluations. Under an
    asynchronous barrier few silos evaluate a version, and a silo with easy data could reach the target for all. Then
    the score pools the newest evaluation of every connected silo.

    For the same reason, a score counts only if it pools more than half of the silos that ever evaluated a version or
    are to evaluate one and have finished no order yet. Lost silos belong to these silos, dropped silos do not. Other
    scores are reported, but no decision uses them.

    ``best`` is the best accuracy of a settled version (see `standing_in`), minus infinity before the first;
    ``since_best`` counts the versions settled since then; ``settled`` is the newest settled version, -1 before the
    first.
    """

    metrics: tuple[AnyMetric, ...] = ()
    best: float = -inf
    since_best: int = 0
    settled: int = -1
    _open: dict[int, _Pool] = field(default_factory=dict)
    _done: list[int] = field(default_factory=list)
    _newest: dict[str, int] = field(default_factory=dict)
    _rolling: _Pool = field(default_factory=_Pool)

    known: Mapping[str, Statistic] = field(init=False)

    def __post_init__(self) -> None:
        self.known = statistics_of(self.metrics)

    def begin(self, version: int, count: int = 1, newcomers: Iterable[str] = ()) -> None:
        """Add ``count`` orders based on a version; ``newcomers`` evaluate it, and have finished no order yet."""
        self._open.setdefault(version, _Pool()).under_way += count
        for silo in newcomers:
            self._newest.setdefault(silo, _FIRST)

    def end(self, version: int, silo: str, evaluation: Evaluation | None) -> None:
        pool = self._open[version]
        pool.under_way -= 1
        if pool.under_way == 0:
            self._done.append(version)
        if evaluation is not None and evaluation.samples > 0:
            if silo not in pool.found:  # a second evaluation of the same model by the same silo has the same result
                pool.found[silo] = evaluation
                pool.add(evaluation, self.known)
            self.forget(silo)
            self._newest[silo] = version
            self._rolling.found[silo] = evaluation
            self._rolling.add(evaluation, self.known)
        elif self._newest.get(silo) == _FIRST:
            del self._newest[silo]

    @property
    def starting(self) -> bool:
        return _FIRST in self._newest.values()

    def under_way(self, version: int) -> bool:
        return version in self._open

    def forget(self, silo: str, *, dropped: bool = False) -> None:
        """Remove a lost silo's evaluation from the rolling pool; it still counts for the versions that it evaluated."""
        if silo in self._rolling.found:
            self._rolling.add(self._rolling.found.pop(silo), self.known, times=-1)
            self._newest[silo] = -1
        if dropped:
            self._newest.pop(silo, None)

    def restart(self, version: int) -> None:
        self._open = {version: _Pool()}
        self._done = []

    def settle(self) -> list[Settled]:
        """Settle every version without pending evaluations; return them, oldest version first. A version older than the
        newest settled one gets no score: the rolling pool already holds newer evaluations.
        """
        if not self._done:
            return []
        settled = []
        for version in sorted(set(self._done)):
            if self._open[version].under_way > 0:
                continue  # new evaluations of this version began
            pool = self._open.pop(version)
            if pool.samples == 0 or version < self.settled:
                continue
            if len(pool.found) < len(self._rolling.found):
                pool = self._rolling
            score = Score(version, *pool.score, pool.sums.numbers(self.metrics))
            counts = 2 * len(pool.found) > len(self._newest)
            settled.append(Settled(score, pool.found, counts))
            self._count(score, counts=counts)
        self._done = []
        return settled

    def attest(self, score: Score) -> bool:
        """Take a score attested by silos under sealed figures; return False if this or a newer version is settled."""
        if score.version <= self.settled:
            return False
        self._count(score)
        return True

    def _count(self, score: Score, *, counts: bool = True) -> None:
        self.settled = max(self.settled, score.version)
        value = standing_in(score.numbers)
        if value is not None and counts:
            self.since_best = 0 if value > self.best else self.since_best + 1
            self.best = max(self.best, value)

    def covers(self, version: int, silos: Iterable[str]) -> bool:
        return self.settled >= version and all(self._newest.get(silo, -1) == version for silo in silos)


Numbers = Mapping[str, float]
"""Metric name -> value; a metric that could not be computed is absent."""

Judge = Callable[[Numbers, Mapping[str, Numbers]], float]
"""User-defined rule: maps the pooled numbers and each silo's numbers to one number, of which more is better."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Rule that rates a version by one number: the pooled metric, the worst silo's, or the result of a user's rule.

    ``metric`` is the metric's name, or the name of the user's rule.
    """

    metric: str = "accuracy"
    higher: bool = True
    by: Literal["pooled", "worst"] | Judge = "pooled"

    def value(self, score: Score, found: Mapping[str, Evaluation], metrics: Sequence[AnyMetric]) -> float | None:
        """Return the finite rating; None if the metric is not reported or could not be computed. ``found`` holds the
        pooled evaluations by silo; it is empty if the figures of single silos are sealed. Raises `UserCodeError` if a
        user's rule fails.
        """
        if self.by == "pooled":
            value = self._of(score.numbers)
        elif self.by == "worst":
            only = [metric for metric in metrics if metric.name == self.metric]
            values = [self._of(numbers_of(each, only)) for each in found.values()]
            told = [each for each in values if each is not None]
            value = (min if self.higher else max)(told) if told else None
        else:
            silos = {name: numbers_of(each, metrics) for name, each in found.items()}
            try:
                value = float(self.by(score.numbers, silos))
                if isnan(value):
                    raise ValueError("it returned nan")
            except Exception as error:  # whatever a user's rule raises
                problem = f"{self.metric} does not rate version {score.version}: {type(error).__name__}: {error}"
                remedy = "Correct the function; a metric that cannot be computed is absent from its arguments"
                raise UserCodeError(f"evaluation.best.by: {problem}. {remedy}") from error
        return value if value is not None and isfinite(value) else None

    def _of(self, numbers: Numbers) -> float | None:
        return standing_in(numbers) if self.metric == "accuracy" else numbers.get(self.metric)


def stated(score: Score, value: float | None) -> dict[str, Any]:
    return {"version": score.version, "value": value, "metrics": dict(score.numbers)}


def numbers_of(evaluation: Evaluation, metrics: Iterable[AnyMetric]) -> Numbers:
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
    """Best version by one rule: its score (None before the first), its rating, and the versions judged since then. A
    version is judged once, when its score settles, by the silos' validation splits. The first of equal versions stays.
    ``problem`` is the first failure of a user's rule; a version for which the rule fails is not judged.
    """

    score: Score | None = None
    value: float = 0.0
    since: int = 0
    problem: str = ""

    @property
    def version(self) -> int:
        return -1 if self.score is None else self.score.version

    def after(
        self, rule: Selection, score: Score, found: Mapping[str, Evaluation], metrics: Sequence[AnyMetric]
    ) -> Leader:
        try:
            value = rule.value(score, found, metrics)
        except UserCodeError as error:
            return replace(self, problem=self.problem or str(error))
        if value is None:
            return self
        if self.score is None or (value > self.value if rule.higher else value < self.value):
            return replace(self, score=score, value=value, since=0)
        return replace(self, since=self.since + 1)

    def told(self, rule: Selection, best: Score) -> Leader:
        """Return the version ``best`` that silos keep: under sealed figures they decide themselves, by ``rule``."""
        return self if best.version == self.version else Leader(best, rule.value(best, {}, ()) or 0.0)
