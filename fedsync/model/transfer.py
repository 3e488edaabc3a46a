"""What passes between a silo and the place where updates are added: payloads, and who makes and takes them.

Everything that decides is blind to payloads. A driver moves them: the server's `Aggregator` gives each silo what it
needs to have the current model, the silo's `Replica` turns that into the model and an update into what is sent back.
In the clear both are float32 vectors. Under encryption they are sealed bytes, the model itself lives at the
silos, and a `Aggregator` sends what a silo has not seen yet.
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
"""One flat array: float32 values in the clear, or uint8 sealed bytes."""

NO_PAYLOAD: Payload = np.empty(0, np.uint8)
"""Nothing, of what a silo trains for itself."""

MAX_SEALED_BYTES = 2**32
"""Largest payload that a silo accepts: 500 million parameters at 16 bits."""


@dataclass(frozen=True, slots=True)
class VersionMismatch:
    """What came is of no use here, or did not come.

    Args:
        holds: version of the model that the silo has, -1 for none, which what came does not continue.
        announcement: hexadecimal; the silo's announcement for masks, where what came has another or none.
    """

    holds: int
    announcement: str = ""


class OtherVersion(FedSyncError):
    """What came does not continue the model version that the silo holds; nothing was changed.

    Args:
        holds: the version that it holds.
        wanted: the version that what came continues.
        announcement: the silo's for masks, where what came has another or none.
    """

    def __init__(self, holds: int, wanted: int, announcement: bytes = b"") -> None:
        key = ", and has another key of this silo for masks" if announcement else ""
        super().__init__(f"the silo holds version {holds} of the model, what came continues version {wanted}{key}")
        self.mismatch = VersionMismatch(holds, announcement.hex())


class Aggregator(Protocol):
    """The server's side: adds updates."""

    @property
    def upload_bytes(self) -> int:
        """Size of an update as it travels."""

    @property
    def seals_figures(self) -> bool:
        """Whether losses, evaluations and other figures of a single silo are none of the server's business."""

    def greet(self, silo: str, version: int, greeting: Payload | None) -> None:
        """A silo has come; it holds ``version``, and sent what its `Replica.greeting` is.

        Raises:
            ProtocolError: the silo sent something else.
        """

    def outgoing(self, silo: str, subject: Subject = Subject.LAST) -> Payload:
        """What ``silo`` needs in order to have the current model, or the best one."""

    def apart(self, order: WorkOrder) -> Payload:
        """What a silo needs for an order that trains a model of its own; `NO_PAYLOAD` where it has all."""

    def put_own(self, silo: str, model: Payload) -> None:
        """Keep a silo's local model for others to evaluate, after the checks of `put`.

        Raises:
            ProtocolError: the silo sent something else.
        """

    def own(self, silo: str) -> Payload:
        """A silo's local model, as it came."""

    def holds(self, silo: str, version: int) -> None:
        """The silo is known to have this version of the model; what it does not need to be sent again."""

    def begin(self, update_id: str) -> None:
        """An order starts from the current model."""

    def put(self, silo: str, update_id: str, update: Payload) -> None:
        """Keep an update, after a check that it can do no harm.

        Raises:
            ProtocolError: the silo sent something else.
        """

    def commit(self, commit: Commit) -> None:
        """Fold updates into the model."""

    def notes(self) -> list[str]:
        """For the result of the run: what commits did not bring, a sentence each."""

    def savepoint(self) -> None: ...

    def rollback(self) -> None:
        """Go back to the model last remembered."""

    def keep_best(self, version: int) -> None:
        """Keep the model of this version as the best: the current one, or that of an order in work or pending."""

    def discard(self, update_id: str) -> None: ...

    @property
    def blocked(self) -> bool:
        """Whether the last commit waits for silos to answer `questions`; until then nothing goes out."""

    def questions(self) -> Mapping[str, Payload]:
        """What silos have to be asked before the last commit counts, by name; each question comes up once."""

    def answer(self, silo: str, answer: Payload) -> None:
        """A silo's answer to its question.

        Raises:
            ProtocolError: it is not one.
        """

    def give_up(self, silo: str) -> None:
        """The silo does not answer: others are asked for what it knows, or the last commit brings nothing."""

    def announce(self, silo: str, announcement: str) -> None:
        """A silo takes part in masks under another key than was thought: what `VersionMismatch` says.

        Raises:
            ProtocolError: it is not the silo's key.
        """

    def leave(self, silo: str) -> None:
        """The silo is gone, until it is greeted again."""

    @property
    def wants_snapshot(self) -> bool:
        """Whether a silo should send its model, sealed, so that older updates can be forgotten."""

    @property
    def snapshot_bytes(self) -> int:
        """Largest snapshot, in bytes."""

    def put_snapshot(self, silo: str, version: int, snapshot: Payload) -> None:
        """Keep a silo's sealed model ``version`` for silos that have none.

        Raises:
            ProtocolError: the silo sent something else.
        """


def store(aggregator: Aggregator, silo: str, order: WorkOrder, update: Payload | None) -> None:
    """Keep what came of an order: an update, a silo's own model if it was asked for and sent, or nothing.

    None is an update that the aggregator has already, in the sum of its region.

    Raises:
        ProtocolError: the silo sent something else.
    """
    if update is None:
        return
    if not order.apart:
        aggregator.put(silo, order.update_id, update)
    elif order.share and update.nbytes:
        aggregator.put_own(silo, update)


class InTheClear:
    """What a `Aggregator` need not do where updates travel in the clear, and nothing is kept at the silos."""

    def greet(self, silo: str, version: int, greeting: Payload | None) -> None: ...

    def holds(self, silo: str, version: int) -> None: ...

    @property
    def seals_figures(self) -> bool:
        return False

    def notes(self) -> list[str]:
        return []

    @property
    def blocked(self) -> bool:
        return False

    def questions(self) -> Mapping[str, Payload]:
        return {}

    def answer(self, silo: str, answer: Payload) -> None:
        raise ProtocolError(silo, "answer", "nobody asked")

    def give_up(self, silo: str) -> None: ...

    def announce(self, silo: str, announcement: str) -> None: ...

    def leave(self, silo: str) -> None: ...

    @property
    def wants_snapshot(self) -> bool:
        return False

    @property
    def snapshot_bytes(self) -> int:
        return 0

    def put_snapshot(self, silo: str, version: int, snapshot: Payload) -> None:
        raise ProtocolError(silo, "snapshot", "nobody asked for one")


class DurableAggregator(Aggregator, Protocol):
    """A store that another process can go on with, and that takes sums of regions."""

    def sum_bytes(self, members: int) -> int:
        """Largest sum of so many updates of a region, in bytes; see `fedsync.model.region_sums`."""

    def put_sum(self, relay: str, update_ids: Sequence[str], payload: Payload) -> None:
        """Keep the sum of a region's updates, after a check that it can do no harm; it counts as a whole.

        Args:
            relay: who sent it.
            update_ids: of its members, two or more.
            payload: as a `fedsync.model.region_sums.RegionAdder` made it.

        Raises:
            ProtocolError: the relay sent something else.
        """

    def state(self) -> Mapping[str, Any]:
        """All that must survive a restart, as values that pickle."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` of another store, made with the same arguments, has returned."""


class Replica(Protocol):
    """A silo's side: has the model, and makes updates ready to travel."""

    @property
    def holds(self) -> int:
        """Version of the model that it has; 0 is the one before any training, -1 none at all."""

    @property
    def model(self) -> Vector:
        """The model that it has, float32 [values]."""

    @property
    def best_model(self) -> Vector | None:
        """The best model so far, where silos keep it, float32 [values]; None where the server does, or nobody."""

    @property
    def best_version(self) -> int:
        """Which version that is; -1 where there is none."""

    @property
    def unrevealed(self) -> bool:
        """Whether the server has yet to ask for something that only this process can tell; see `answer`."""

    def greeting(self) -> Payload | None:
        """What the server is to have from this silo before its first order, or None."""

    def receive(self, payload: Payload, version: int) -> Vector:
        """The model ``version``, float32 [values].

        Raises:
            OtherVersion: what came continues another version than the one here.
            ProtocolError: the server sent something else.
        """

    def send(self, update: Vector, order: WorkOrder, report: WorkReport) -> Payload:
        """An update, float32 [values], as it travels.

        Whoever calls gives ``update`` away, for it is as large as the model and is not copied: what is returned may be
        the same array, and else its memory may have been overwritten. `PlainReplica` works out in it what is owed.
        """

    @property
    def control(self) -> Vector | None:
        """m of `fedsync.model.control_variates` beside the model received last, float32 [values]; None without any."""

    def counted(self, silo: str) -> int:
        """Number of this silo's newest update that a commit had, of which `control` is; 0 for none."""

    def arriving(self, update: Vector, order: WorkOrder, report: WorkReport) -> Vector:
        """What comes of an update at the sum once it is sent, float32 [values]; asked before `send`."""

    @property
    def pooled(self) -> tuple[PooledFigures, ...] | None:
        """What silos found together in the commits received last, oldest first; None where each tells its own."""

    @property
    def owed(self) -> Vector | None:
        """What the next update will have to make up for, once the one made last is saved; see `owe`."""

    def owe(self, owed: Vector | None) -> None:
        """What the next update has to make up for: `owed` of the last order that is saved."""

    def disclosed(self, report: WorkReport) -> WorkReport:
        """What the server is told of an order that this silo did."""

    def answer(self, question: Payload) -> Payload:
        """Answer what the server asks on behalf of all silos; see `Aggregator.questions`.

        Raises:
            ProtocolError: no silo should be asked that.
        """

    def snapshot(self) -> Payload:
        """The model that it holds, sealed for other silos."""
