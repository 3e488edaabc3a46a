"""Protocols for model data: `Aggregator` at the server, and `Replica`, a silo's copy of the model.

The coordinator never sees payloads; a driver (main loop) moves them. Without encryption, payloads are float32 vectors.
Under encryption they are sealed bytes: the model exists at the silos only, and the `Aggregator` sends a silo the
changes that it lacks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedsync.common.errors import FedSyncError, ProtocolError
from fedsync.core.actions import Commit
from fedsync.core.orders import PooledFigures, Subject, WorkOrder, WorkReport
from fedsync.model.layout import Vector

Payload = NDArray[Any]
"""Flat array: float32 values without encryption, or uint8 sealed bytes."""

NO_PAYLOAD: Payload = np.empty(0, np.uint8)
"""Empty payload, for a model that a silo trains for itself."""

MAX_SEALED_BYTES = 2**32
"""Largest payload that a silo accepts: 500 million parameters at 16 bits."""


@dataclass(frozen=True, slots=True)
class VersionMismatch:
    """Notice of an unusable or missing payload. ``holds`` is the silo's model version, -1 for none; ``announcement`` is
    its announcement for masks, hexadecimal, if the payload has another announcement or none.
    """

    holds: int
    announcement: str = ""


class OtherVersion(FedSyncError):
    """Error: the payload continues version ``wanted``, which is not the silo's model version; nothing was changed."""

    def __init__(self, holds: int, wanted: int, announcement: bytes = b"") -> None:
        key = ", and has another key of this silo for masks" if announcement else ""
        super().__init__(f"the silo holds version {holds} of the model, what came continues version {wanted}{key}")
        self.mismatch = VersionMismatch(holds, announcement.hex())


class Aggregator(Protocol):
    """Server side of the transfer: adder of updates. Invalid data of a silo raise ProtocolError."""

    @property
    def upload_bytes(self) -> int:
        """Encoded size of an update."""

    @property
    def seals_figures(self) -> bool:
        """Whether figures of single silos, such as losses and evaluations, are hidden from the server."""

    def greet(self, silo: str, version: int, greeting: Payload | None) -> None:
        """Register a silo that joins with model ``version`` and the payload of `Replica.greeting`."""

    def outgoing(self, silo: str, subject: Subject = Subject.LAST) -> Payload:
        """Return the payload that gives ``silo`` the current or the best model."""

    def apart(self, order: WorkOrder) -> Payload:
        """Return the payload for an order that trains a separate model; `NO_PAYLOAD` if the silo needs none."""

    def put_own(self, silo: str, model: Payload) -> None:
        """Store a silo's local model for evaluation by others, after the checks of `put`."""

    def own(self, silo: str) -> Payload:
        """Return a silo's local model as received."""

    def holds(self, silo: str, version: int) -> None:
        """Record that the silo has this model version, so that it is not sent again."""

    def begin(self, update_id: str) -> None:
        """Register an order that starts from the current model."""

    def put(self, silo: str, update_id: str, update: Payload) -> None:
        """Check and store an update."""

    def commit(self, commit: Commit) -> None:
        """Fold updates into the model."""

    def notes(self) -> list[str]:
        """Return messages for the run's result about failed parts of commits, a sentence each."""

    def savepoint(self) -> None: ...

    def rollback(self) -> None:
        """Restore the model of the last savepoint."""

    def keep_best(self, version: int) -> None:
        """Keep this version's model as the best: the current one, or the base of a running order or pending update."""

    def discard(self, update_id: str) -> None: ...

    @property
    def blocked(self) -> bool:
        """Whether the last commit waits for answers to `questions`; until then nothing is sent."""

    def questions(self) -> Mapping[str, Payload]:
        """Return the questions, by silo, whose answers the last commit needs; each question is returned once."""

    def answer(self, silo: str, answer: Payload) -> None:
        """Take a silo's answer to its question."""

    def give_up(self, silo: str) -> None:
        """Stop waiting for a silo's answer: others are asked for its knowledge, or the last commit is void."""

    def announce(self, silo: str, announcement: str) -> None:
        """Take a silo's new key for masks, as in `VersionMismatch`."""

    def leave(self, silo: str) -> None:
        """Remove a silo until it is greeted again."""

    @property
    def wants_snapshot(self) -> bool:
        """Whether a silo should send its sealed model, so that older updates can be dropped."""

    @property
    def snapshot_bytes(self) -> int:
        """Size limit of a snapshot."""

    def put_snapshot(self, silo: str, version: int, snapshot: Payload) -> None:
        """Store a silo's sealed model ``version`` for silos without a model."""


def store(aggregator: Aggregator, silo: str, order: WorkOrder, update: Payload | None) -> None:
    """Store an order's result: an update, a silo's own model if requested and sent, or nothing; `ProtocolError` if
    invalid. An update of None is already in the aggregator, in the sum of its region.
    """
    if update is None:
        return
    if not order.apart:
        aggregator.put(silo, order.update_id, update)
    elif order.share and update.nbytes:
        aggregator.put_own(silo, update)


class InTheClear:
    """Base of an `Aggregator` without encryption and without models at the silos: empty defaults."""

    seals_figures = False
    blocked = False
    wants_snapshot = False
    snapshot_bytes = 0

    def greet(self, silo: str, version: int, greeting: Payload | None) -> None: ...

    def holds(self, silo: str, version: int) -> None: ...

    def notes(self) -> list[str]:
        return []

    def questions(self) -> Mapping[str, Payload]:
        return {}

    def answer(self, silo: str, answer: Payload) -> None:
        raise ProtocolError(silo, "answer", "nobody asked")

    def give_up(self, silo: str) -> None: ...

    def announce(self, silo: str, announcement: str) -> None: ...

    def leave(self, silo: str) -> None: ...

    def put_snapshot(self, silo: str, version: int, snapshot: Payload) -> None:
        raise ProtocolError(silo, "snapshot", "none was requested")


class DurableAggregator(Aggregator, Protocol):
    """Aggregator that another process can restore, and that takes sums of regions."""

    def sum_bytes(self, members: int) -> int:
        """Largest encoded size of a region's sum of ``members`` updates [bytes]; see `fedsync.extras.relays`."""

    def put_sum(self, relay: str, update_ids: Sequence[str], payload: Payload) -> None:
        """Check and store a relay's sum of two or more updates, which counts as a whole; `ProtocolError` if invalid."""

    def state(self) -> Mapping[str, Any]:
        """Return all state that must survive a restart, as picklable values."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a `state` of an aggregator built with the same arguments."""


class Replica(Protocol):
    """Silo side of the transfer: holder of the model, and encoder of updates."""

    @property
    def holds(self) -> int:
        """Version of the held model; 0 before any training, -1 for no model."""

    @property
    def model(self) -> Vector:
        """Held model, float32 [values]."""

    @property
    def best_model(self) -> Vector | None:
        """Best model, float32 [values]; None unless silos keep the best model."""

    @property
    def best_version(self) -> int:
        """Version of `best_model`; -1 for none."""

    @property
    def unrevealed(self) -> bool:
        """Whether the server may still ask for data that only this process has; see `answer`."""

    def greeting(self) -> Payload | None:
        """Return the payload that the server needs before the first order, or None."""

    def receive(self, payload: Payload, version: int) -> Vector:
        """Decode the model ``version``, float32 [values]; `ProtocolError` if the payload is invalid. Raises
        `OtherVersion` if the payload continues another version than the held one.
        """

    def send(self, update: Vector, order: WorkOrder, report: WorkReport) -> Payload:
        """Encode an update, float32 [values]. The update is as large as the model, so it is not copied: its memory may
        be overwritten (`PlainReplica` computes the residual in it), or be part of the result.
        """

    @property
    def control(self) -> Vector | None:
        """Control m of `fedsync.model.control_variates` for the last received model, float32 [values], or None."""

    def counted(self, silo: str) -> int:
        """Number of this silo's newest committed update, of which `control` takes account; 0 for none."""

    def arriving(self, update: Vector, order: WorkOrder, report: WorkReport) -> Vector:
        """Return the values of an update in the sum after encoding, float32 [values]; called before `send`."""

    @property
    def pooled(self) -> tuple[PooledFigures, ...] | None:
        """Pooled figures of the last received commits, oldest first; None if each silo reports its own."""

    @property
    def owed(self) -> Vector | None:
        """Residual of the last encoded update, valid once its order is saved; see `owe`."""

    def owe(self, owed: Vector | None) -> None:
        """Set the residual for the next update: `owed` of the last saved order."""

    def disclosed(self, report: WorkReport) -> WorkReport:
        """Return the part of an order's report that the server may see."""

    def answer(self, question: Payload) -> Payload:
        """Answer a question of `Aggregator.questions` for all silos; raises `ProtocolError` if it is not allowed."""

    def snapshot(self) -> Payload:
        """Return the held model, sealed for other silos."""
