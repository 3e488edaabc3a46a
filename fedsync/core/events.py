"""Events: the coordinator's input, such as joins, updates and failures. A driver (main loop) passes them in batches."""

from __future__ import annotations

from dataclasses import dataclass

from fedsync.core.operator.operator_commands import OperatorQuestion
from fedsync.core.orders import Evaluation, PooledFigures, SiloFacts, Split, Subject, UpdateMeta, WorkReport


@dataclass(frozen=True, slots=True)
class SiloJoined:
    """Arrival of an idle silo. A silo that joins again has lost its orders."""

    at_s: float
    silo: str
    facts: SiloFacts


SERVER_RESTARTED = "the server was restarted"
"""Reason of the loss of all silos whose orders ended with the server's process; the silos did not fail."""


@dataclass(frozen=True, slots=True)
class SiloLost:
    """Loss of a silo, with all its orders."""

    at_s: float
    silo: str
    reason: str


@dataclass(frozen=True, slots=True)
class WorkFailed:
    """End of an order without a usable update; the silo is idle again. With ``back_s``, the silo is away for this time
    [s], and the order does not count as failed.
    """

    at_s: float
    silo: str
    update_id: str
    reason: str
    back_s: float | None = None


@dataclass(frozen=True, slots=True)
class UpdateArrived:
    """Arrival of an update. The driver has checked its payload and stores it under ``meta.update_id``."""

    at_s: float
    meta: UpdateMeta
    report: WorkReport


@dataclass(frozen=True, slots=True)
class Progressed:
    """Progress report of a busy silo."""

    at_s: float
    silo: str
    update_id: str
    steps: int
    samples: int


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Answer to an `Evaluate` action; ``evaluation`` is None if it failed, or if metrics are encrypted (sealed
    figures). With sealed figures, ``pooled`` holds the metrics that the silo decrypted from commits.
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
    """Expiry of a requested `WakeAt`. Late and duplicate timers are harmless."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Spare:
    """Spare time of the driver: predictors may train for ``epochs`` epochs, summed over all silos. It is an event
    because training changes later decisions: a replay must train equally long at the same moments.
    """

    at_s: float
    epochs: int


@dataclass(frozen=True, slots=True)
class OperatorAsked:
    """Request of the server's user for a change; see `fedsync.core.operator.operator_commands`.

    Args:
        request: id of the request; a repeated id marks a duplicate.
        problem: reason of the driver, which knows the whole configuration, to refuse; "" for none.
    """

    at_s: float
    request: str
    question: OperatorQuestion
    problem: str = ""


Event = SiloJoined | SiloLost | WorkFailed | UpdateArrived | Progressed | Evaluated | TimerFired | Spare | OperatorAsked
