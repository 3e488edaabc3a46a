"""Actions: the coordinator's only output. A driver (main loop with clock and messages) carries them out in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedsync.core.orders import PooledFigures, Score, Split, Subject, WorkOrder


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Command to send ``order`` and the current model to ``silo``."""

    silo: str
    order: WorkOrder


@dataclass(frozen=True, slots=True)
class Commit:
    """Command to add pending updates to the model, which becomes ``version``.

    The new model is ``model + sum_i c_i update_i``. With ``toward`` it is ``model + sum_i c_i (base_i + update_i -
    model)``, where ``base_i`` is the model that silo i started from.

    Args:
        weights: update id -> c_i; they sum to 1 for weighted means only. Sorted by id, so that every driver adds in the
            same order and gets the same bits.
        steps: sum of c_i tau_i, the local steps behind the sum; 0 unless silos keep control variates.
        stands_for: sum of the updates' integer weights n_i (`fedsync.core.silo_weight`); 0 unless silos keep variates.
    """

    version: int
    weights: Mapping[str, float]
    toward: bool = False
    steps: float = 0.0
    stands_for: int = 0


@dataclass(frozen=True, slots=True)
class HaltEarly:
    """Request that a busy silo, if reachable, stops after its current step and sends its update."""

    silo: str
    update_id: str


@dataclass(frozen=True, slots=True)
class Probe:
    """Request for a busy silo's progress. A silo that can answer does so with `Progressed`."""

    silo: str
    update_id: str


@dataclass(frozen=True, slots=True)
class Savepoint:
    """Command to keep the current model, which is ``version``, until the next `Savepoint`."""

    version: int


@dataclass(frozen=True, slots=True)
class Rollback:
    """Command to replace the model by that of the last `Savepoint`, as ``version``."""

    version: int


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Timer: call again with `TimerFired` at ``at_s``, unless another event comes first."""

    at_s: float


@dataclass(frozen=True, slots=True)
class KeepBest:
    """Command to keep the version of ``score`` as the best model, before any change of the model. ``value`` is its
    value by the run's selection rule (`fedsync.evaluation.version_scores.Selection`).
    """

    score: Score
    value: float


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Request to evaluate model ``version`` on a split; with ``owner``, other silos evaluate that silo's own model."""

    version: int
    silos: tuple[str, ...]
    split: Split = Split.VALIDATION
    subject: Subject = Subject.LAST
    owner: str = ""


@dataclass(frozen=True, slots=True)
class Discard:
    """Command to delete the payload ``update_id``, if present, for the given reason."""

    update_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Note:
    """Message for the user. No action follows."""

    text: str


@dataclass(frozen=True, slots=True)
class Attested:
    """Pooled figures that more than half of the silos, and at least two, reported identically; the server uses them."""

    figures: PooledFigures


@dataclass(frozen=True, slots=True)
class OperatorAnswered:
    """Answer to an operator's request, sent once its effects would survive a restart. ``refused`` is the reason why
    nothing changed, or "". ``again`` marks a duplicate request, which changes nothing.
    """

    request: str
    refused: str = ""
    again: bool = False


@dataclass(frozen=True, slots=True)
class Stop:
    """Command to end the run. ``failed`` marks an end that the user did not want."""

    reason: str
    failed: bool = False


Action = (
    Dispatch | Commit | HaltEarly | Probe | Savepoint | Rollback | WakeAt | KeepBest | Evaluate | Discard | Note
    | Attested | OperatorAnswered | Stop
)  # fmt: skip
