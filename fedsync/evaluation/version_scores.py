"""Scores of model versions, pooled from the silos' evaluations during training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf

from fedsync.core.orders import Evaluation, Score
from fedsync.evaluation.metrics.metric_types import AnyMetric, ExactSum, Statistic, statistics_of
from fedsync.evaluation.metrics.pool import SumsPool


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
        """Mean score and mean loss."""
        score = self.correct.value / self.with_score if self.with_score else None
        return score, self.loss.value / self.with_loss if self.with_loss else None

    def add(self, evaluation: Evaluation, known: Mapping[str, Statistic], times: int = 1) -> None:
        """Add an evaluation, or remove it with ``times=-1``; only the ``known`` statistics of its sums count."""
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


@dataclass(slots=True)
class Scores:
    """Pool of evaluations by version, with the best score. Every method takes O(1) for a silo or a version.

    Silos evaluate the model of an order before they train on it. So version v is evaluated by the orders based on v,
    and is settled once none of these orders is running.

    Under a synchronous barrier all silos evaluate each version, and its score pools these evaluations. Under an
    asynchronous barrier few silos evaluate a version, and their data say little about the other silos' data. Then
    the score pools the newest evaluation of every connected silo. Otherwise a silo with easy data would reach the
    target for all.

    Args:
        metrics: additional metrics of a score.
        best: best accuracy of a settled version, minus infinity before the first. See `standing_in`.
        since_best: number of versions settled since then.
        settled: newest settled version, -1 before the first.
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
    """Statistics that ``metrics`` need, by key."""

    def __post_init__(self) -> None:
        self.known = statistics_of(self.metrics)

    def begin(self, version: int, count: int = 1) -> None:
        """Register ``count`` pending evaluations of ``version``."""
        pool = self._open.get(version)
        if pool is None:
            pool = self._open[version] = _Pool()
        pool.under_way += count

    def end(self, version: int, silo: str, evaluation: Evaluation | None) -> None:
        """End a pending evaluation with its result, or with None if it is given up."""
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

    def under_way(self, version: int) -> bool:
        return version in self._open

    def forget(self, silo: str) -> None:
        """Remove a lost silo's evaluation from the rolling pool; it still counts for the versions that it evaluated."""
        if self._newest.pop(silo, None) is not None:
            self._rolling.add(self._rolling.found.pop(silo), self.known, times=-1)

    def restart(self, version: int) -> None:
        """Drop the pending evaluations at the end of training; all silos then evaluate ``version``."""
        self._open = {version: _Pool()}
        self._done = []

    def settle(self) -> list[Settled]:
        """Settle every version without pending evaluations; return them, oldest version first.

        A version older than the newest settled one gets no score. The rolling pool already holds evaluations of
        newer versions, and the late evaluation counts for the next score.
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
            if len(pool.found) < len(self._newest):
                pool = self._rolling
            settled.append(Settled(Score(version, *pool.score, pool.sums.numbers(self.metrics)), pool.found))
            self._count(settled[-1].score)
        self._done = []
        return settled

    def attest(self, score: Score) -> bool:
        """Take a score attested by silos under sealed figures; return False if this or a newer version is settled."""
        if score.version <= self.settled:
            return False
        self._count(score)
        return True

    def _count(self, score: Score) -> None:
        self.settled = max(self.settled, score.version)
        value = standing_in(score.numbers)
        if value is not None:
            self.since_best = 0 if value > self.best else self.since_best + 1
            self.best = max(self.best, value)

    def covers(self, version: int, silos: Iterable[str]) -> bool:
        """Whether ``version`` is settled and is the newest version that each of ``silos`` evaluated."""
        return self.settled >= version and all(self._newest.get(silo, -1) == version for silo in silos)
