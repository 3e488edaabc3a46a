"""Messages between a silo's session and its training process, over a socket pair.

A frame has a head, a text and parts. The head holds the number of parts, their lengths, and the length of the text.
The text is a value as JSON. The parts are arrays in their memory layout. Nothing is unpickled. The receiver bounds the
length of each part before it allocates memory, because a user's code runs on the other side.
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
from fedsync.core.orders import Cursor, Evaluation, Split, WorkOrder, WorkReport
from fedsync.model.layout import Layout
from fedsync.privacy.release import PrivateSettings
from fedsync.train.silo_trainer import TensorPlace, TrainerFacts

Part = NDArray[np.uint8]

_COUNTS = struct.Struct("<IB")
_MOST_TEXT, _MOST_PARTS, _SEND_S = 2**22, 4, 60.0
_AT_ONCE = 2**20

MOST_PRIVATE = 2**28 + 2**20
"""Limit of the private parts in a message [bytes]: `fedsync.train.private.MOST_BYTES`, plus room for their names."""


@dataclass(frozen=True, slots=True)
class BuildTrainer:
    """Request to build the trainer.

    Args:
        identity: JSON of `fedsync.silo.protocol.Identity`.
        spec: JSON of the run's specification as the owner allows it; its paths are those of the silo's data.
        least_samples: minimum that an order processes before it may end, set by the owner [samples].
    """

    identity: str
    spec: str
    least_samples: int


@dataclass(frozen=True, slots=True)
class BuildKeeper:
    """Request to build the model only, in place of `BuildTrainer`, with the same arguments."""

    identity: str
    spec: str


@dataclass(frozen=True, slots=True)
class FillModel:
    """Request for all tensors of a model. Parts: the model, private parts."""


@dataclass(frozen=True, slots=True)
class TrainOrder:
    """Request to carry out an order.

    Parts: base model, private parts of the model, and the correction of the steps if there is one. ``cursor`` comes
    from the last order. ``throttled`` asks for the pace of the emulated machine. ``ids`` is the value of
    `fedsync.common.environment.FLOWER_IDS`.
    """

    order: WorkOrder
    cursor: Cursor
    throttled: bool
    ids: str


@dataclass(frozen=True, slots=True)
class EvaluateGiven:
    """Request to evaluate a model. Parts: the model, private parts.

    Args:
        cursor: from the last order.
        gains: whether to report the gains over the silo's own model.
        quiet: a failed evaluation yields no result instead of an error.
        ids: value of `fedsync.common.environment.FLOWER_IDS`.
    """

    cursor: Cursor
    split: Split
    subject: str
    gains: bool
    quiet: bool
    ids: str


@dataclass(frozen=True, slots=True)
class BuildInitialModel:
    """Request for the model before any training."""


@dataclass(frozen=True, slots=True)
class MakePrivate:
    """Request to train by DP-SGD from now on."""

    settings: PrivateSettings


@dataclass(frozen=True, slots=True)
class HaltOrder:
    """Request to end this order after its next step. It has no reply."""

    update_id: str


@dataclass(frozen=True, slots=True)
class AskCurrentLine:
    """Request for the code line that the main thread executes. The reply does not wait for the work."""


RoomRequest = (
    BuildTrainer
    | BuildKeeper
    | FillModel
    | TrainOrder
    | EvaluateGiven
    | BuildInitialModel
    | MakePrivate
    | HaltOrder
    | AskCurrentLine
)


@dataclass(frozen=True, slots=True)
class TrainerBuilt:
    """The trainer is built; ``batch_cap`` as `SiloTrainer.find_batch_cap_on_gpu`."""

    facts: TrainerFacts
    batch_cap: int | None


@dataclass(frozen=True, slots=True)
class KeeperBuilt:
    """The model is built."""

    layout: Layout


@dataclass(frozen=True, slots=True)
class ModelFilled:
    """All tensors of a model, and their values in the only part."""

    tensors: tuple[TensorPlace, ...]


@dataclass(frozen=True, slots=True)
class MadePrivate:
    """The trainer trains privately; ``units`` is the number of the silo's examples or persons."""

    units: int


@dataclass(frozen=True, slots=True)
class OrderProgress:
    """Progress of an order that is still running."""

    steps: int
    samples: int


@dataclass(frozen=True, slots=True)
class OrderDone:
    """Result of an order; ends with the fields of `fedsync.core.orders.Cursor`. Parts: update, private model parts."""

    report: WorkReport
    epoch: int
    position: int
    state: str


@dataclass(frozen=True, slots=True)
class ModelEvaluated:
    """Evaluation of a model; None where the evaluation failed."""

    found: Evaluation | None


@dataclass(frozen=True, slots=True)
class InitialModelBuilt:
    """Reply with the initial model, as its only part."""


@dataclass(frozen=True, slots=True)
class CurrentLine:
    """Code line that the main thread executes."""

    line: str


@dataclass(frozen=True, slots=True)
class RoomFailure:
    """Error of a closed list of kinds; see `fedsync.silo.room.failures`."""

    kind: str
    texts: tuple[str, ...]
    lacks: str = ""


RoomReply = (
    TrainerBuilt
    | KeeperBuilt
    | ModelFilled
    | MadePrivate
    | OrderProgress
    | OrderDone
    | ModelEvaluated
    | InitialModelBuilt
    | CurrentLine
    | RoomFailure
)


class RoomChannel:
    """One end of the socket pair. Any thread may send; one thread receives.

    Args:
        sends: union of the message types that this end sends; ``receives`` likewise.
        trusted: the other side is FedSync's own program, without a user's code.
    """

    def __init__(self, end: socket.socket, sends: object, receives: object, *, trusted: bool) -> None:
        self._end, self._sends, self._receives, self._trusted = end, sends, receives, trusted
        self._sending = threading.Lock()

    def send(self, value: RoomRequest | RoomReply, *parts: NDArray[np.float32] | bytes) -> None:
        """Send a value and its parts; raise `OSError` if the other side is gone, or does not read for 60 s."""
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
        """Receive the next message with its parts.

        Args:
            most: size limit of each part [bytes].

        Raises:
            EOFError: the other side is gone.
            OSError: the connection broke, or the message is invalid or exceeds a limit.
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
        """Wait for a message; return whether one arrived."""
        return bool(wait([self._end], seconds))

    def close(self) -> None:
        """Shut the channel down, even while another thread uses it."""
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
