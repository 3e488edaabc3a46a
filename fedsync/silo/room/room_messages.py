"""Messages between a silo's session and its training process, over a pair of sockets.

A frame is a head (number of parts and length of each, then length of the text), the text, which is a value as JSON, and
the parts: arrays as they lie in memory. Nobody unpickles anything, and who receives says how long each part may be
before memory is taken for it: a user's code is on the other side.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait

import numpy as np
from numpy.typing import NDArray

from fedsync.common import codec
from fedsync.core.cursor import Cursor
from fedsync.core.orders import Evaluation, Split, WorkOrder, WorkReport
from fedsync.model.layout import Layout
from fedsync.model.table_columns import TableForm

Part = NDArray[np.uint8]

_COUNTS = struct.Struct("<IB")
_MOST_TEXT, _MOST_PARTS, _SEND_S = 2**22, 4, 60.0
_AT_ONCE = 2**20

MOST_PRIVATE = 2**28 + 2**20
"""Bytes of private parts in a message: `fedsync.train.private.MOST_BYTES`, and their names."""


@dataclass(frozen=True, slots=True)
class BuildTrainer:
    """Build what trains: the silo, and the run as its owner allows it, both as JSON.

    Args:
        identity: see `fedsync.silo.protocol.Identity`.
        spec: the run's specification; paths in it are those of the silo's data.
        least_samples: that an order processes before it may end, by the owner's word.
    """

    identity: str
    spec: str
    least_samples: int


@dataclass(frozen=True, slots=True)
class TrainOrder:
    """Carry out an order. Parts: base model, private parts of the model, correction of the steps if there is one.

    Args:
        order: what to do.
        cursor: what the last order left.
        throttled: at the pace of the machine that the silo emulates.
        ids: see `fedsync.common.environment.FLOWER_IDS`.
    """

    order: WorkOrder
    cursor: Cursor
    throttled: bool
    ids: str


@dataclass(frozen=True, slots=True)
class EvaluateGiven:
    """Evaluate a model. Parts: the model, private parts.

    Args:
        cursor: what the last order left.
        split: on which samples.
        subject: name of the model.
        gains: tell what it gains over the silo's own.
        quiet: an evaluation that fails is none, and no error.
        ids: see `fedsync.common.environment.FLOWER_IDS`.
    """

    cursor: Cursor
    split: Split
    subject: str
    gains: bool
    quiet: bool
    ids: str


@dataclass(frozen=True, slots=True)
class BuildInitialModel:
    """Make the model before any training."""


@dataclass(frozen=True, slots=True)
class HaltOrder:
    """End this order after its next step. Not answered."""

    update_id: str


@dataclass(frozen=True, slots=True)
class AskCurrentLine:
    """Say at which line the work stands. Answered at once."""


RoomRequest = BuildTrainer | TrainOrder | EvaluateGiven | BuildInitialModel | HaltOrder | AskCurrentLine


@dataclass(frozen=True, slots=True)
class TrainerBuilt:
    """The trainer that was built; see `fedsync.train.silo_trainer.SiloTrainer`. ``frozen`` is hexadecimal."""

    layout: Layout
    frozen: str
    kept_names: tuple[str, ...]
    table: TableForm | None
    device: str
    examples: int
    validates: bool
    batch_cap: int | None


@dataclass(frozen=True, slots=True)
class OrderProgress:
    """Progress of an order; its answer is yet to come."""

    steps: int
    samples: int


@dataclass(frozen=True, slots=True)
class OrderDone:
    """An order is done. Parts: update, private parts of the model.

    Args:
        report: for the server.
        epoch: see `fedsync.core.cursor.Cursor`.
        position: likewise.
        state: likewise.
    """

    report: WorkReport
    epoch: int
    position: int
    state: str


@dataclass(frozen=True, slots=True)
class ModelEvaluated:
    """Evaluation of a model; None where that failed."""

    found: Evaluation | None


@dataclass(frozen=True, slots=True)
class InitialModelBuilt:
    """The first model, which is the part."""


@dataclass(frozen=True, slots=True)
class CurrentLine:
    """The line at which the work stands."""

    line: str


@dataclass(frozen=True, slots=True)
class RoomFailure:
    """An error, of a closed list of kinds; see `fedsync.silo.room.failures`."""

    kind: str
    texts: tuple[str, ...]
    lacks: str = ""


RoomReply = TrainerBuilt | OrderProgress | OrderDone | ModelEvaluated | InitialModelBuilt | CurrentLine | RoomFailure


class RoomChannel:
    """One end of the pair. Anybody may send; one thread receives.

    Args:
        end: of the pair.
        sends: union of what is sent here.
        receives: union of what comes.
        trusted: the other side is a program of FedSync's own, without a user's code.
    """

    def __init__(self, end: socket.socket, sends: object, receives: object, *, trusted: bool) -> None:
        self._end, self._sends, self._receives, self._trusted = end, sends, receives, trusted
        self._sending = threading.Lock()

    def send(self, value: RoomRequest | RoomReply, *parts: NDArray[np.float32] | bytes) -> None:
        """Send a value, and parts beside it.

        Raises:
            OSError: nobody is there.
        """
        text = codec.dumps(value, self._sends).encode()
        views = [part if isinstance(part, bytes) else np.ascontiguousarray(part).data.cast("B") for part in parts]
        head = _COUNTS.pack(len(text), len(views)) + struct.pack(f"<{len(views)}Q", *map(len, views))
        if not self._sending.acquire(timeout=_SEND_S):
            raise OSError("the other side does not read")
        try:
            self._end.sendall(head + text)
            for view in views:
                self._end.sendall(view)
        finally:
            self._sending.release()

    def receive(self, most: Sequence[int] = ()) -> tuple[RoomRequest | RoomReply, list[Part]]:
        """The next message, with its parts, which may have so many bytes each.

        Raises:
            EOFError: nobody is there.
            OSError: likewise, or what came is not what the two say to each other.
        """
        length, count = _COUNTS.unpack(self._bytes(_COUNTS.size).tobytes())
        if length > _MOST_TEXT or count > _MOST_PARTS:
            raise OSError(f"a text of {length} bytes with {count} parts")
        sizes = struct.unpack(f"<{count}Q", self._bytes(8 * count).tobytes())
        text = self._bytes(length).tobytes()
        if count > len(most) or any(size > bound for size, bound in zip(sizes, most, strict=False)):
            raise OSError(f"parts of {sizes} bytes, at most {tuple(most)}")
        try:
            value: RoomRequest | RoomReply = codec.loads(self._receives, text, own=self._trusted)
        except codec.DecodeError as error:
            raise OSError(str(error)) from error
        return value, [self._bytes(size) for size in sizes]

    def poll(self, seconds: float) -> bool:
        """Wait until something comes, for so long at most; returns whether it does."""
        return bool(wait([self._end], seconds))

    def close(self) -> None:
        """Shut the channel down, also under the hands of a thread that sends or receives."""
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def _bytes(self, length: int) -> Part:
        found = np.empty(length, np.uint8)
        view, done = found.data, 0
        while done < length:
            came = self._end.recv_into(view[done : done + _AT_ONCE])
            if came == 0:
                raise EOFError
            done += came
        return found
