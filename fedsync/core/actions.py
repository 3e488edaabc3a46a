"""What a driver is to do, in order. Actions are the coordinator's only output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedsync.core.orders import PooledFigures, Score, Split, Subject, WorkOrder, fast_dataclass


@fast_dataclass
@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send ``order`` and the current model to ``silo``."""

    silo: str
    order: WorkOrder


@fast_dataclass
@dataclass(frozen=True, slots=True)
class Commit:
    """Fold stored updates into the model, which becomes ``version``.

    The model becomes ``model + sum_i c_i update_i`` or, if ``toward``, ``model + sum_i c_i (base_i +
    update_i - model)``, where ``base_i`` is the model that the silo started from.

    Args:
        version: of the new model.
        weights: update id -> c_i, final: they sum to 1 for weighted means only. Sorted by id, so that
            every driver adds in the same order and ends with the same bits.
        toward: move towards the silos' whole models instead of along their updates.
        steps: local steps that the sum is worth, the sum of c_i tau_i, where silos keep control variates.
        stands_for: what the updates stand for together, the sum of n_i of `fedsync.core.weighting`; likewise.
    """

    version: int
    weights: Mapping[str, float]
    toward: bool = False
    steps: float = 0.0
    stands_for: int = 0


@dataclass(frozen=True, slots=True)
class HaltEarly:
    """Ask a busy silo to stop after its current step and send what it has, if it can be reached."""

    silo: str
    update_id: str


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask a busy silo how far it is; it answers with `Progressed`, if it can."""

    silo: str
    update_id: str


@dataclass(frozen=True, slots=True)
class Savepoint:
    """Keep the current model, which is ``version``, until the next `Savepoint`."""

    version: int


@dataclass(frozen=True, slots=True)
class Rollback:
    """The remembered model becomes ``version``."""

    version: int


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Call again at ``at_s`` with `TimerFired`, if nothing happens before."""

    at_s: float


@dataclass(frozen=True, slots=True)
class KeepBest:
    """Keep the model of a version, which no later one has surpassed yet, in the place of the one kept before.

    It comes before all that the entry does to the model.

    Args:
        score: of the version, by all its metrics.
        value: of the version, by the rule of the run; see `fedsync.evaluation.best_version.Selection`.
    """

    score: Score
    value: float


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Have ``silos`` evaluate a model, which is ``version``, on a split; by default the newest, as in every round.

    With an ``owner`` the model is that silo's, which others evaluate.
    """

    version: int
    silos: tuple[str, ...]
    split: Split = Split.VALIDATION
    subject: Subject = Subject.LAST
    owner: str = ""


@dataclass(frozen=True, slots=True)
class Discard:
    """Forget the payload ``update_id``, if it is there, for the reason given."""

    update_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Note:
    """Something that the user ought to know; nothing is to be done."""

    text: str


@dataclass(frozen=True, slots=True)
class Attested:
    """Enough silos say that they found this together; nothing is to be done, but from now on it is believed."""

    figures: PooledFigures


@dataclass(frozen=True, slots=True)
class OperatorAnswered:
    """Tell the server's user what came of a question, once all that follows from it would survive a restart.

    Args:
        request: names the question.
        refused: why nothing was changed; "" where it was.
        again: the question came again, so that nothing was changed now.
    """

    request: str
    refused: str = ""
    again: bool = False


@dataclass(frozen=True, slots=True)
class Stop:
    """End the run. ``failed`` says that it did not end as the user wished."""

    reason: str
    failed: bool = False


Action = (
    Dispatch
    | Commit
    | HaltEarly
    | Probe
    | Savepoint
    | Rollback
    | WakeAt
    | KeepBest
    | Evaluate
    | Discard
    | Note
    | Attested
    | OperatorAnswered
    | Stop
)
