"""How good each model version is, pooled from what silos evaluate on the way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf

from fedsync.core.orders import Evaluation, Score
from fedsync.evaluation.metrics.metric_types import AnyMetric, ExactSum, Statistic, statistics_of
from fedsync.evaluation.metrics.pool import SumsPool


def standing_in(numbers: Mapping[str, float]) -> float | None:
    """The accuracy among these; where silos tell none, minus the loss, of which more is better too."""
    value = numbers.get("accuracy")
    return -numbers["loss"] if value is None and "loss" in numbers else value


@dataclass(slots=True)
class _Pool:
    """Sums over the silos in it, and how many evaluations are still to come."""

    under_way: int = 0
    found: dict[str, Evaluation] = field(default_factory=dict)
    loss: ExactSum = field(default_factory=ExactSum)
    correct: ExactSum = field(default_factory=ExactSum)
    samples: int = 0
    with_loss: int = 0
    with_score: int = 0
    """Of the samples, those of which somebody told the loss; and the score."""
    sums: SumsPool = field(default_factory=SumsPool)

    @property
    def score(self) -> tuple[float | None, float | None]:
        """Means of the score and of the loss."""
        score = self.correct.value / self.with_score if self.with_score else None
        return score, self.loss.value / self.with_loss if self.with_loss else None

    def add(self, evaluation: Evaluation, known: Mapping[str, Statistic], times: int = 1) -> None:
        """Put an evaluation in, or take it out again with ``times=-1``; of its sums the known ones."""
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
    """A version on which no evaluation is under way any more.

    Args:
        score: of the version.
        found: what each silo found that is in it; may change with the next evaluation.
    """

    score: Score
    found: Mapping[str, Evaluation]


@dataclass(slots=True)
class Scores:
    """Pools evaluations by version and keeps the best. Every method takes O(1) for a silo or a version.

    Silos evaluate the model that an order brings before they train on it, so version v is evaluated by
    the orders based on v, and is settled once none of those is in work.

    Where all silos go on together, all of them evaluate each version, and its score pools just that. Where
    each goes on by itself, a version is evaluated by one or a few, whose own data say little of the others':
    then the score pools the newest evaluation of every silo that is here. Else a silo that holds easy data
    would reach the target for all.

    Args:
        metrics: numbers that a score has besides.
        best: best accuracy of a settled version, minus infinity before there is one. See `standing_in`.
        since_best: settled versions since then.
        settled: newest settled version, -1 before there is one.
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
    """Statistics that ``metrics`` want, by key."""

    def __post_init__(self) -> None:
        self.known = statistics_of(self.metrics)

    def begin(self, version: int, count: int = 1) -> None:
        """So many evaluations of ``version`` are under way."""
        pool = self._open.get(version)
        if pool is None:
            pool = self._open[version] = _Pool()
        pool.under_way += count

    def end(self, version: int, silo: str, evaluation: Evaluation | None) -> None:
        """The evaluation of ``version`` by ``silo`` came back, or is given up (None)."""
        pool = self._open[version]
        pool.under_way -= 1
        if pool.under_way == 0:
            self._done.append(version)
        if evaluation is not None and evaluation.samples > 0:
            if silo not in pool.found:  # one that starts from the same model twice finds the same twice
                pool.found[silo] = evaluation
                pool.add(evaluation, self.known)
            self.forget(silo)
            self._newest[silo] = version
            self._rolling.found[silo] = evaluation
            self._rolling.add(evaluation, self.known)

    def under_way(self, version: int) -> bool:
        """Whether an evaluation of ``version`` is."""
        return version in self._open

    def forget(self, silo: str) -> None:
        """The silo is gone: what it found counts for the versions that it evaluated only."""
        if self._newest.pop(silo, None) is not None:
            self._rolling.add(self._rolling.found.pop(silo), self.known, times=-1)

    def restart(self, version: int) -> None:
        """Training is over: forget which evaluations are under way; all silos begin one of ``version``."""
        self._open = {version: _Pool()}
        self._done = []

    def settle(self) -> list[Settled]:
        """Settle every version on which no evaluation is under way; returns them, oldest version first.

        One that a newer version has overtaken gets none. The score would be of what silos have found in newer ones by
        now, and what its last silo found counts for the next.
        """
        if not self._done:
            return []
        settled = []
        for version in sorted(set(self._done)):
            if self._open[version].under_way > 0:
                continue  # more have begun since
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
        """Silos attest a score, where each one's own is sealed; whether it counts: a newer one may be settled."""
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
        """Whether ``version`` is settled and the newest that each of ``silos`` evaluated."""
        return self.settled >= version and all(self._newest.get(silo, -1) == version for silo in silos)
