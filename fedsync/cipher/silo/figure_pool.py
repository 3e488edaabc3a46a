"""Pools of encrypted metrics that silos publish together, and a list of all data that a silo discloses.

| data | form in which the server gets it | reason |
|---|---|---|
| update, greeting (size of updates), snapshot, seeds of masks | sealed for silos | equal sizes at all silos |
| name, device, version held, layout of the model | clear | the server must address requests |
| declared speed, room in memory, largest batch that fitted | clear | batch sizes follow from them |
| steps, samples and seconds of an order, speeds in its course | clear | the server orders and times them |
| seconds of overhead | their sum | one part is the evaluation, which takes longer for more samples |
| training loss, evaluation, squared norm of the update | encrypted header | it gets pools instead, see below |
| training samples held | encrypted header, as a weight | a public number replaces them: ``cipher.examples`` |
| test samples held | encrypted header | |
| other figures (`WorkReport.metrics`) | not at all | no decision uses them |
| answer to `EvaluateModel` | pools | the sent model is not evaluated: the server could choose it |

Silos add up the figures of successive versions in a pool. With a quorum of q, they publish the pool once it has updates
of q silos, or 2 q updates of more than q / 2 silos. Then a new pool begins, so no two pools share an update. If q silos
evaluated one version, only the evaluations of this version are published. If not all silos of a version evaluated, none
of its evaluations counts. Results on the test split are published separately for each model, and always for the same
silos (`Panel`). Published figures are means of four digits: longer fractions would disclose the number of samples.
`docs/internals/cryptography/metrics.md` describes the attacks.

The *best* model follows from the pools, so all silos keep the same one; it is in the state's digest. A kept model has a
file beside the silo's state: written before the state names the model, and removed after it names another model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedsync.cipher.encoding.sums import MAX_CELL
from fedsync.cipher.encoding.tally import Tally, evaluations_together, total
from fedsync.cipher.suites.suite import Member
from fedsync.common import foreign
from fedsync.common.errors import ConfigError
from fedsync.common.files import OWNER_FILE, private_folder, write_pieces
from fedsync.core.orders import Evaluation, PooledFigures, Score
from fedsync.core.report_checks import usable
from fedsync.evaluation.metrics.metric_types import AnyMetric, Statistic, number, published
from fedsync.evaluation.version_scores import Leader, Selection
from fedsync.model.chunked_arrays import digest, file_part, map_file, pieces
from fedsync.model.layout import Vector

logger = foreign.logger(__name__)


@dataclass(frozen=True, slots=True)
class FigurePool:
    """Sums over the updates since the last published pool.

    Args:
        loss: sum of the silos' mean training losses; None where not all reported a loss.
        evaluators: those of ``silos`` whose evaluations are summed in ``evaluation``.
        evaluated: newest version that one of them evaluated; -1 for none.
        began: newest version when the pool began.
        offered: newest evaluated version whose model silos can still keep: ``began``, or a version that was the newest
            when its evaluation came; -1 for none.
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
        self, version: int, tally: Tally, members: Sequence[Member], quorum: int, metrics: Sequence[AnyMetric] = ()
    ) -> tuple[FigurePool, PooledFigures | None]:
        """Add ``version``, with the tally and the members of all its sums; return the pool, and the published figures
        if they are of enough silos. ``tally`` must be of the question of rounds.
        """
        silos, bases = frozenset(member.silo for member in members), {member.round for member in members}
        least = fewest(quorum)
        counts = _counts(tally, silos, least)
        pool = replace(
            self, silos=self.silos | silos, updates=self.updates + tally.count, loss=total((self.loss, tally.loss))
        )
        if tally.evaluation is not None and counts:
            # Where all silos evaluated, earlier evaluations of few silos are dropped unpublished.
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
        score = None
        if pool.evaluation is not None and pool.evaluation.samples and len(pool.evaluators) >= least:
            score = _score(pool.evaluated if pool.offered < 0 else pool.offered, pool.evaluation, metrics)
        return FigurePool(), PooledFigures(version, _mean(pool.loss, pool.updates), score)

    def to_json(self) -> list[Any]:
        """Encode for a silo's file; floats are restored bit by bit."""
        found = self.evaluation
        sums = None if found is None else [found.loss, found.correct, found.samples, dict(found.sums)]
        versions = self.evaluated, self.began, self.offered
        return [sorted(self.silos), self.updates, self.loss, sorted(self.evaluators), sums, *versions]

    @classmethod
    def from_json(cls, value: list[Any]) -> FigurePool:
        silos, updates, loss, evaluators, sums, evaluated, began, offered = value
        names = frozenset(str(silo) for silo in silos), frozenset(str(silo) for silo in evaluators)
        found = None
        if sums is not None:
            summed, correct, samples, each = sums
            statistics = {str(key): tuple(map(float, values)) for key, values in each.items()}
            found = Evaluation(number_or_none(summed), number_or_none(correct), int(samples), sums=statistics)
        versions = int(evaluated), found, int(began), int(offered)
        return cls(names[0], int(updates), number_or_none(loss), names[1], *versions)


def number_or_none(value: Any) -> float | None:
    return None if value is None else float(value)


def _counts(tally: Tally, silos: frozenset[str], least: int) -> bool:
    """Whether all silos of a version evaluated it, and all, or at least ``least`` distinct silos, have samples."""
    if tally.evaluation is None or tally.evaluators != tally.count:
        return False
    return tally.holders == tally.count or (len(silos) == tally.count and tally.holders >= least)


@dataclass(frozen=True, slots=True)
class Panel:
    """Silos of a run's first published answer, and their number of test samples; later answers need the same silos."""

    silos: frozenset[str]
    samples: int

    def to_json(self) -> list[Any]:
        return [sorted(self.silos), self.samples]

    @classmethod
    def from_json(cls, value: list[Any]) -> Panel:
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
    """Process a version that answers a question; return the panel, and the published figures of this sum alone.
    ``panel`` is that of the earlier answers; None before the first. Other arguments are as in `FigurePool.after`.
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
    """Least number of silos for published figures: two, and more than half of a quorum."""
    return max(2, quorum // 2 + 1)


def _score(version: int, found: Evaluation, metrics: Sequence[AnyMetric]) -> Score:
    numbers = {each.name: number(each, np.array(found.sums[each.statistic.key])) for each in metrics}
    told = {name: published(value) for name, value in numbers.items() if value is not None}
    return Score(version, _mean(found.correct, found.samples), _mean(found.loss, found.samples), told)


def _mean(total: float | None, of: int) -> float | None:
    return None if total is None else published(total / of)


def countable(silo: str, evaluation: Evaluation | None, statistics: Sequence[Statistic]) -> Evaluation:
    """``evaluation`` as silos can add it: all sums of the run, or zeros; `ConfigError` for too many samples."""
    known = {one.key: one for one in statistics}
    found = usable(silo, evaluation, known)
    if found is None or known.keys() - found.sums.keys():
        if evaluation is not None:
            logger.warning("this silo's evaluation is no sum over samples: it is ignored")
        return Evaluation(0.0, 0.0, 0)
    for key, one in known.items():
        if one.whole and max(found.sums[key]) > MAX_CELL:
            problem = f"{key} counts {max(found.sums[key]):g} samples in one cell, at most {MAX_CELL}"
            raise ConfigError("evaluation", problem, "Evaluate on fewer samples")
    return found


FOLDER = "models"  # folder beside the silo's state


@dataclass(frozen=True, slots=True, eq=False)
class KeptModel:
    """Model of an earlier version, float32 [values], with its SHA-256 (hexadecimal); ``score`` None is pending."""

    version: int
    model: Vector
    digest: str
    score: Score | None = None

    @classmethod
    def of(cls, version: int, model: Vector, score: Score | None = None) -> KeptModel:
        return cls(version, model, digest(model).hex(), score)

    def to_json(self) -> list[Any]:
        score = self.score
        told = None if score is None else [score.version, score.accuracy, score.loss, dict(score.metrics)]
        return [self.version, self.digest, told]

    @classmethod
    def from_json(cls, value: list[Any], model: Vector) -> KeptModel:
        version, expected, told = value
        if digest(model).hex() != expected:
            raise ValueError(f"another model than that of version {version}")
        if told is None:
            return cls(int(version), model, expected)
        scored, accuracy, loss, metrics = told
        numbers = {str(name): float(number) for name, number in metrics.items()}
        score = Score(int(scored), number_or_none(accuracy), number_or_none(loss), numbers)
        return cls(int(version), model, expected, score)

    def in_file(self, folder: Path) -> KeptModel:
        file = file_of(folder, self.to_json())
        lies = file_part(self.model)
        if lies is None or lies.path != file:
            private_folder(folder)
            write_pieces(file, pieces(self.model), OWNER_FILE)
        return replace(self, model=map_file(file, np.float32))


def surpasses(score: Score, best: KeptModel | None, rule: Selection) -> bool:
    leader = Leader()
    if best is not None and best.score is not None:
        leader = leader.after(rule, best.score, {}, ())
    return leader.after(rule, score, {}, ()).score is score


def file_of(folder: Path, kept: list[Any]) -> Path:
    version, expected, _ = kept
    # Named by the model's digest: a version may repeat in a run that lost its newest checkpoint.
    name = hashlib.sha256(f"{int(version)} {expected}".encode()).hexdigest()
    return folder / f"{name[:32]}.bin"


def remove_others(folder: Path, kept: Iterable[KeptModel]) -> None:
    if folder.is_dir():
        known = {file_of(folder, each.to_json()) for each in kept}
        for file in set(folder.iterdir()) - known:
            file.unlink(missing_ok=True)
