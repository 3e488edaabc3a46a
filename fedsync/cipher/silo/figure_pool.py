"""What leaves a silo besides its update, where metrics are sealed; and the figures that silos tell together.

| what | told to the server | because |
|---|---|---|
| update, greeting, snapshot, seeds of masks | sealed for silos | their sizes are the same for all silos |
| name, device, version held, layout of the model | yes | who is asked for what |
| declared speed, room in memory, largest batch that fitted | yes | batch sizes follow from them |
| steps, samples and seconds of an order, speeds in its course | yes | the server orders and times them |
| seconds of overhead | their sum | one kind of it is the evaluation, which takes longer for more samples |
| training loss, evaluation | in the header | the server hears of pools, see below |
| training samples held | in the header, as a weight | a public number stands in their place: ``cipher.examples`` |
| test samples held | in the header | |
| squared norm of the update, where the server tunes the run | in the header | the server hears of pools, see below |
| other figures (`WorkReport.metrics`) | no | nothing decides by them |
| answer to `EvaluateModel` | pools | the model is not looked at: the server could choose it |

A version may hold the updates of few silos, or of one: its figures would be that silo's. So silos add up the figures of
one version after the other and tell the server once all silos of a quorum are among them; where some stay away, once
there are twice as many updates as that and more than half of the silos are. Then a new pool begins, so no two pools
share an update. All silos see the same versions, so all have the same pools.

Where all silos of a quorum evaluated for one version, its evaluations alone are told. So is the last version of a run,
whose score comes in a version that changes nothing (`fedsync.evaluation.final_evaluation`).

What is found on the test split is told for each model by itself, and of the same silos each time (`Panel`). Else the
server could leave one out of the second answer, of a model that hardly differs from the first: it says how silos train.

A silo does not evaluate one model for the server twice, and evaluates none if the server says so. Of a version that not
all of its silos have evaluated, no evaluation counts: else the server could ask all silos but one twice.

What is told are means of four digits. A silo's training loss counts once for each update, however many samples the
server had it train on, and so does the squared norm of its update: else the server could give the others one sample
each. Four digits, because a longer fraction tells how many samples are behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedsync.cipher.encoding.sums import MAX_CELL
from fedsync.cipher.encoding.tally import Tally, evaluations_together, total
from fedsync.cipher.suites.suite import Member
from fedsync.common import foreign
from fedsync.common.errors import ConfigError
from fedsync.core.orders import Evaluation, PooledFigures, Score
from fedsync.core.report_checks import usable
from fedsync.evaluation.metrics.metric_types import AnyMetric, Statistic, number

logger = foreign.logger(__name__)

_DIGITS = 4


@dataclass(frozen=True, slots=True)
class FigurePool:
    """Sums over the updates since the last pool that was told.

    Args:
        silos: whose updates are in it.
        updates: how many there are.
        loss: sum of their mean training losses; None where not all told theirs.
        evaluators: of ``silos``, those whose evaluations are in it.
        evaluated: newest version that one of them evaluated; -1 for none.
        evaluation: sums of these evaluations.
        began: newest version when the pool began.
        offered: newest version that one of them evaluated and whose model silos can still keep: that with which the
            pool began, or one that was the newest when that evaluation came; -1 for none.
    """

    silos: frozenset[str] = frozenset()
    updates: int = 0
    loss: float | None = 0.0
    evaluators: frozenset[str] = frozenset()
    evaluated: int = -1
    evaluation: Evaluation | None = None
    began: int = 0
    offered: int = -1

    def after(
        self,
        version: int,
        tally: Tally,
        members: Sequence[Member],
        quorum: int,
        metrics: Sequence[AnyMetric] = (),
    ) -> tuple[FigurePool, PooledFigures | None]:
        """The pool once ``version`` is in it, and what the server is told if that was enough.

        Args:
            version: of the model.
            tally: of all sums of the version; it has no answer to another question than that of rounds.
            members: of all of them.
            quorum: silos whose figures are enough.
            metrics: what is worked out of the sums of evaluations.
        """
        silos, bases = frozenset(member.silo for member in members), {member.round for member in members}
        least = fewest(quorum)
        counts = _counts(tally, silos, least)
        pool = replace(
            self,
            silos=self.silos | silos,
            updates=self.updates + tally.count,
            loss=total((self.loss, tally.loss)),
        )
        if tally.evaluation is not None and counts:
            # Where all silos evaluated, what few found in versions before is told by nobody.
            before = FigurePool() if len(silos) >= max(2, quorum) else self
            offered = [each for each in (self.began, version - 1) if each in bases]
            found = [each for each in (before.evaluation, tally.evaluation) if each is not None]
            pool = replace(
                pool,
                evaluators=before.evaluators | silos,
                evaluated=max(before.evaluated, *bases),
                evaluation=evaluations_together(found),
                offered=max(before.offered, *offered) if offered else before.offered,
            )
        if len(pool.silos) < max(2, quorum) and (len(pool.silos) < least or pool.updates < 2 * quorum):
            return pool, None
        return FigurePool(), pool._figures(version, least, metrics)

    def _figures(self, version: int, least: int, metrics: Sequence[AnyMetric]) -> PooledFigures:
        """What the server is told, at this version, of at least so many silos."""
        score = None
        if self.evaluation is not None and self.evaluation.samples and len(self.evaluators) >= least:
            score = _score(self.evaluated if self.offered < 0 else self.offered, self.evaluation, metrics)
        return PooledFigures(version, _mean(self.loss, self.updates), score)

    def to_json(self) -> list[Any]:
        """For a silo's file; floats come back bit by bit."""
        found = self.evaluation
        sums = None if found is None else [found.loss, found.correct, found.samples, dict(found.sums)]
        versions = self.evaluated, self.began, self.offered
        return [sorted(self.silos), self.updates, self.loss, sorted(self.evaluators), sums, *versions]

    @classmethod
    def from_json(cls, value: list[Any]) -> FigurePool:
        """The inverse of `to_json`; raises `TypeError` or `ValueError` if it is none."""
        silos, updates, loss, evaluators, sums, evaluated, began, offered = value
        names = frozenset(str(silo) for silo in silos), frozenset(str(silo) for silo in evaluators)
        found = None if sums is None else _evaluation(*sums)
        versions = int(evaluated), found, int(began), int(offered)
        return cls(names[0], int(updates), number_or_none(loss), names[1], *versions)


def _evaluation(loss: Any, correct: Any, samples: Any, sums: Any) -> Evaluation:
    statistics = {str(key): tuple(float(one) for one in values) for key, values in sums.items()}
    return Evaluation(number_or_none(loss), number_or_none(correct), int(samples), sums=statistics)


def number_or_none(value: Any) -> float | None:
    """A figure from JSON; raises `TypeError` or `ValueError` if it is none."""
    return None if value is None else float(value)


def _counts(tally: Tally, silos: frozenset[str], least: int) -> bool:
    """Whether a version's evaluation is of all its silos, and not in truth of few, the others having no samples."""
    if tally.evaluation is None or tally.evaluators != tally.count:
        return False
    return tally.holders == tally.count or (len(silos) == tally.count and tally.holders >= least)


@dataclass(frozen=True, slots=True)
class Panel:
    """Whose test samples the answers of a run are of: those of the first that was told.

    Args:
        silos: who answered.
        samples: that they have together.
    """

    silos: frozenset[str]
    samples: int

    def to_json(self) -> list[Any]:
        """For a silo's file."""
        return [sorted(self.silos), self.samples]

    @classmethod
    def from_json(cls, value: list[Any]) -> Panel:
        """The inverse of `to_json`; raises `TypeError` or `ValueError` if it is none."""
        silos, samples = value
        return cls(frozenset(str(silo) for silo in silos), int(samples))


def answer(
    version: int,
    tally: Tally,
    members: Sequence[Member],
    quorum: int,
    metrics: Sequence[AnyMetric],
    panel: Panel | None,
) -> tuple[Panel | None, PooledFigures | None]:
    """Of a version that answers a question, whose answers there are now, and what the server is told: a sum by itself.

    Args:
        panel: of the answers before; None before there is one.
        version: as the others, of `FigurePool.after`.
    """
    silos, found, least = frozenset(member.silo for member in members), tally.evaluation, fewest(quorum)
    if found is None or not found.samples or not _counts(tally, silos, least) or len(silos) < least:
        return panel, None
    answered = Panel(silos, found.samples)
    if panel not in (None, answered):
        return panel, None
    (subject, split), base = tally.question, max(member.round for member in members)
    return answered, PooledFigures(version, None, _score(base, found, metrics), None, split, subject)


def fewest(quorum: int) -> int:
    """Silos that figures are told of at least: two, and more than half of a quorum."""
    return max(2, quorum // 2 + 1)


def _score(version: int, found: Evaluation, metrics: Sequence[AnyMetric]) -> Score:
    """Means and numbers of a sum."""
    numbers = {each.name: number(each, np.array(found.sums[each.statistic.key])) for each in metrics}
    told = {name: _rounded(value) for name, value in numbers.items() if value is not None}
    return Score(version, _mean(found.correct, found.samples), _mean(found.loss, found.samples), told)


def _mean(total: float | None, of: int) -> float | None:
    return None if total is None else _rounded(total / of)


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS - 1}e}")


def countable(silo: str, evaluation: Evaluation | None, statistics: Sequence[Statistic]) -> Evaluation:
    """What silos can add up of what ``silo`` found: all sums of the run, or nothing.

    Raises:
        ConfigError: there are more samples than a header can count.
    """
    known = {one.key: one for one in statistics}
    found = usable(silo, evaluation, known)
    if found is None or known.keys() - found.sums.keys():
        if evaluation is not None:
            logger.warning("what this silo found in its evaluation is no sum of samples: it counts for nothing")
        return Evaluation(0.0, 0.0, 0)
    for key, one in known.items():
        if one.whole and max(found.sums[key]) > MAX_CELL:
            problem = f"{key} counts {max(found.sums[key]):g} samples in one cell, at most {MAX_CELL}"
            raise ConfigError("evaluation", problem, "Evaluate on fewer samples")
    return found
