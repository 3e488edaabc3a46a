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
| other figures (`WorkReport.metrics`) | no | nothing decides by them |
| answer to `EvaluateModel` | pools | the model is not looked at: the server could choose it |

A version may hold the updates of few silos, or of one: its figures would be that silo's. So silos add up the figures of
one version after the other and tell the server once all silos of a quorum are among them; where some stay away, once
there are twice as many updates as that and more than half of the silos are. Then a new pool begins, so no two pools
share an update. All silos see the same versions, so all have the same pools.

Where all silos of a quorum evaluated for one version, its evaluations alone are told. So is the last version of a run,
whose score comes in a version that changes nothing (`fedsync.core.closing`).

A silo does not evaluate one model for the server twice, and evaluates none if the server says so. Of a version that not
all of its silos have evaluated, no evaluation counts: else the server could ask all silos but one twice.

What is told are means of four digits. A silo's training loss counts once for each update, however many samples the
server had it train on: else the server could give the others one sample each. Four digits, because a longer fraction
tells how many samples are behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedsync.cipher.encoding.tally import Tally
from fedsync.cipher.suites.suite import Member
from fedsync.core.orders import PooledFigures, Score

_DIGITS = 4


@dataclass(frozen=True, slots=True)
class FigurePool:
    """Sums over the updates since the last pool that was told.

    Args:
        silos: whose updates are in it.
        updates: how many there are.
        loss: sum of their mean training losses.
        evaluators: of ``silos``, those whose evaluations are in it.
        evaluated: newest version that one of them evaluated; -1 for none.
        test_loss: sum over the samples of these evaluations.
        correct: likewise.
        samples: of these evaluations.
    """

    silos: frozenset[str] = frozenset()
    updates: int = 0
    loss: float = 0.0
    evaluators: frozenset[str] = frozenset()
    evaluated: int = -1
    test_loss: float = 0.0
    correct: float = 0.0
    samples: int = 0

    def after(
        self, version: int, tally: Tally, members: Sequence[Member], quorum: int
    ) -> tuple[FigurePool, PooledFigures | None]:
        """The pool once ``version`` is in it, and what the server is told if that was enough.

        Args:
            version: of the model.
            tally: of all sums of the version.
            members: of all of them.
            quorum: silos whose figures are enough.
        """
        silos = frozenset(member.silo for member in members)
        pool = replace(self, silos=self.silos | silos, updates=self.updates + tally.count, loss=self.loss + tally.loss)
        if tally.evaluation is not None and tally.evaluators == tally.count:
            # Where all silos evaluated, what few found in versions before is told by nobody.
            before = FigurePool() if len(silos) >= max(2, quorum) else self
            pool = replace(
                pool,
                evaluators=before.evaluators | silos,
                evaluated=max(before.evaluated, *(member.round for member in members)),
                test_loss=before.test_loss + (tally.evaluation.loss or 0.0),
                correct=before.correct + (tally.evaluation.correct or 0.0),
                samples=before.samples + tally.evaluation.samples,
            )
        least = max(2, quorum // 2 + 1)
        if len(pool.silos) < max(2, quorum) and (len(pool.silos) < least or pool.updates < 2 * quorum):
            return pool, None
        return FigurePool(), pool._figures(version, least)

    def _figures(self, version: int, least: int) -> PooledFigures:
        """What the server is told, at this version, of at least so many silos."""
        score = None
        if self.samples and len(self.evaluators) >= least:
            accuracy, loss = _rounded(self.correct / self.samples), _rounded(self.test_loss / self.samples)
            score = Score(self.evaluated, accuracy, loss)
        return PooledFigures(version, _rounded(self.loss / self.updates), score)

    def to_json(self) -> list[Any]:
        """For a silo's file; floats come back bit by bit."""
        sums = (self.evaluated, self.test_loss, self.correct, self.samples)
        return [sorted(self.silos), self.updates, self.loss, sorted(self.evaluators), *sums]

    @classmethod
    def from_json(cls, value: list[Any]) -> FigurePool:
        """The inverse of `to_json`; raises `TypeError` or `ValueError` if it is none."""
        silos, updates, loss, evaluators, evaluated, test_loss, correct, samples = value
        names = frozenset(str(silo) for silo in silos), frozenset(str(silo) for silo in evaluators)
        sums = float(test_loss), float(correct), int(samples)
        return cls(names[0], int(updates), float(loss), names[1], int(evaluated), *sums)


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS - 1}e}")
