"""What happened. Drivers make events; the coordinator absorbs them in batches."""

from __future__ import annotations

from dataclasses import dataclass

from fedsync.core.operator.operator_commands import OperatorQuestion
from fedsync.core.orders import (
    Evaluation,
    PooledFigures,
    SiloFacts,
    Split,
    Subject,
    UpdateMeta,
    WorkReport,
    fast_dataclass,
)


@dataclass(frozen=True, slots=True)
class SiloJoined:
    """A silo is there and idle. A silo that joins again has lost its order."""

    at_s: float
    silo: str
    facts: SiloFacts


@dataclass(frozen=True, slots=True)
class SiloLost:
    """A silo is gone, with whatever it was doing."""

    at_s: float
    silo: str
    reason: str


@dataclass(frozen=True, slots=True)
class WorkFailed:
    """An order ended without a usable update; the silo is idle again.

    ``back_s`` says that it is away, and for how long [s]: then it was not its fault.
    """

    at_s: float
    silo: str
    update_id: str
    reason: str
    back_s: float | None = None


@fast_dataclass
@dataclass(frozen=True, slots=True)
class UpdateArrived:
    """A checked update is stored in the driver under ``meta.update_id``."""

    at_s: float
    meta: UpdateMeta
    report: WorkReport


@dataclass(frozen=True, slots=True)
class Progressed:
    """A busy silo told how far it is."""

    at_s: float
    silo: str
    update_id: str
    steps: int
    samples: int


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A silo answered an `Evaluate` action; None where it could not, or figures are sealed.

    Then ``pooled`` is what silos found together in the commits that came with the model.
    """

    at_s: float
    silo: str
    version: int
    evaluation: Evaluation | None
    pooled: tuple[PooledFigures, ...] = ()
    split: Split = Split.VALIDATION
    subject: Subject = Subject.LAST
    owner: str = ""


@dataclass(frozen=True, slots=True)
class TimerFired:
    """A requested `WakeAt` is due. Late and duplicate ones are harmless."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Spare:
    """The driver has time: predictors may train for so many epochs, all silos together.

    An event, because what is learned changes decisions: a replay trains as much at the same moments.
    """

    at_s: float
    epochs: int


@dataclass(frozen=True, slots=True)
class OperatorAsked:
    """The server's user wants something changed; see `fedsync.core.operator.operator_commands`.

    Args:
        at_s: seconds since the run began.
        request: names the question; one that comes again is no other.
        question: what is wanted.
        problem: why the driver, who knows the whole configuration, finds that it cannot be; "" if it may.
    """

    at_s: float
    request: str
    question: OperatorQuestion
    problem: str = ""


Event = SiloJoined | SiloLost | WorkFailed | UpdateArrived | Progressed | Evaluated | TimerFired | Spare | OperatorAsked
