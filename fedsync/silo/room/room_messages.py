"""Messages between a silo's session and its training process, over a socket pair, and the session's checks of them.

A frame has a head, a text and parts. The head holds the number of parts, their lengths, and the length of the text. The
text is a value as JSON. The parts are arrays in their memory layout. Nothing is unpickled. The receiver bounds the
length of each part before it allocates memory, because a user's code runs on the other side.
"""

from __future__ import annotations

import errno
import re
import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait

import numpy as np
from numpy.typing import NDArray

from fedsync.common import codec, foreign
from fedsync.common.errors import (
    ConfigError,
    Diverged,
    HugeModel,
    LimitReached,
    OwnerRefusal,
    PolicyError,
    ProtocolError,
    RunError,
    UserCodeError,
)
from fedsync.core.orders import Cursor, Evaluation, Split, WorkOrder, WorkReport
from fedsync.model.layout import Layout
from fedsync.privacy.release import PrivateSettings
from fedsync.silo.owner.refusals import code_of, printed
from fedsync.silo.protocol import InProgress, Refusal
from fedsync.train.silo_trainer import TensorPlace, TrainerFacts

Part = NDArray[np.uint8]

_COUNTS = struct.Struct("<IB")
_MOST_TEXT, _MOST_PARTS, _SEND_S = 2**22, 4, 60.0
_AT_ONCE = 2**20

MOST_PRIVATE = 2**28 + 2**20  # bytes of private parts: `module_parts.MOST_BYTES`, plus room for names


@dataclass(frozen=True, slots=True)
class BuildTrainer:
    """Request to build the trainer; the first in a process. ``identity`` is a `fedsync.silo.protocol.Identity` as JSON,
    ``spec`` the run's specification as JSON with the paths of the silo's data, and ``least_samples`` the owner's
    minimum before an order may end [samples].
    """

    identity: str
    spec: str
    least_samples: int


@dataclass(frozen=True, slots=True)
class BuildKeeper:
    """Request to build the model only, in place of `BuildTrainer`; the reply is its layout."""

    identity: str
    spec: str


@dataclass(frozen=True, slots=True)
class FillModel:
    """Request for all tensors of a model. Parts: the model, private parts."""


@dataclass(frozen=True, slots=True)
class TrainOrder:
    """Request to carry out an order. Parts: base model, private parts of the model, and the correction of the steps if
    there is one. ``throttled`` asks for the pace of the emulated machine.
    """

    order: WorkOrder
    cursor: Cursor
    throttled: bool


@dataclass(frozen=True, slots=True)
class EvaluateGiven:
    """Request to evaluate a model. Parts: the model, private parts. ``gains`` asks for the gains over the silo's own
    model.
    """

    cursor: Cursor
    split: Split
    subject: str
    gains: bool


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
class ModelFilled:
    """All tensors of a model, and their values in the only part."""

    tensors: tuple[TensorPlace, ...]


@dataclass(frozen=True, slots=True)
class MadePrivate:
    """The trainer trains privately; ``units`` is the number of the silo's examples or persons."""

    units: int


@dataclass(frozen=True, slots=True)
class OrderDone:
    """Result of an order; ends with the fields of `fedsync.core.orders.Cursor`. Parts: update, private model parts."""

    report: WorkReport
    epoch: int
    position: int
    state: str


@dataclass(frozen=True, slots=True)
class InitialModelBuilt:
    """Reply with the initial model, as its only part."""


@dataclass(frozen=True, slots=True)
class CurrentLine:
    """Code line that the main thread executes."""

    line: str


@dataclass(frozen=True, slots=True)
class RoomFailure:
    """Error of a closed list of kinds; see `failure_of`. ``lacks`` is ``memory``, ``disk`` or empty."""

    kind: str
    texts: tuple[str, ...]
    lacks: str = ""


RoomReply = (
    TrainerBuilt
    | Layout
    | ModelFilled
    | MadePrivate
    | InProgress
    | OrderDone
    | Evaluation
    | InitialModelBuilt
    | CurrentLine
    | RoomFailure
)


class RoomChannel:
    """One end of the socket pair: any thread may send, one thread receives. ``trusted``: the other side is FedSync's
    own program, without a user's code.
    """

    def __init__(self, end: socket.socket, sends: object, receives: object, *, trusted: bool) -> None:
        self._end, self._sends, self._receives, self._trusted = end, sends, receives, trusted
        self._sending = threading.Lock()

    def send(self, value: RoomRequest | RoomReply, *parts: NDArray[np.float32] | bytes) -> None:
        """Send a value and its parts; `OSError` if the other side is gone, or does not read for 60 s."""
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
        """Receive the next message with its parts, of at most ``most`` bytes each. `EOFError` if the other side is
        gone; `OSError` if the message is invalid or exceeds a limit.
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


_DEVICE = re.compile(r"[a-z]{1,8}(:[0-9]{1,3})?")
_MOST_BYTES, _MOST_DIGEST, _MOST_WINDOWS = 2**40, 64, 64


def checked_trainer(told: RoomReply) -> TrainerBuilt:
    if not isinstance(told, TrainerBuilt):
        raise RunError(f"the training process begins with {type(told).__name__}")
    facts = told.facts
    checked_layout(facts.layout)
    _check(facts.examples >= 0, "examples")
    _check(_DEVICE.fullmatch(facts.device) is not None, "device")
    digest = re.fullmatch(r"([0-9a-f]{2})*", facts.frozen) is not None
    _check(digest and len(facts.frozen) <= 2 * _MOST_DIGEST, "frozen")
    _check(told.batch_cap is None or 1 <= told.batch_cap <= max(facts.examples, 1), "batch_cap")
    return told


def checked_layout(layout: Layout) -> Layout:
    named = len(layout.names) == len(layout.shapes) and all(size >= 0 for shape in layout.shapes for size in shape)
    _check(named and 0 < layout.nbytes <= _MOST_BYTES, "layout")
    return layout


def checked_progress(asked: RoomRequest, told: InProgress) -> InProgress:
    most = asked.order.max_steps if isinstance(asked, TrainOrder) else 0
    _check(0 <= told.steps <= most and told.samples >= 0, "progress")
    return told


def checked_order(order: WorkOrder, told: OrderDone, parts: int, examples: int) -> OrderDone:
    report = told.report
    _check(parts == 2, "parts")
    _check(report.base_version == order.base_version, "base_version")
    _check(1 <= report.steps <= order.max_steps and report.samples >= 0, "steps")
    _check(report.compute_s >= 0 and len(report.windows) <= _MOST_WINDOWS, "times")
    _check(report.batch_cap is None or 1 <= report.batch_cap <= order.batch_size, "batch_cap")
    _check(told.epoch >= 0 and 0 <= told.position <= examples, "cursor")
    return told


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise RunError(f"the training process reports an impossible value of its {what}")


_MOST_REASON = 4000
_OF_PLACES: tuple[type[ConfigError], ...] = (HugeModel, Diverged, LimitReached, OwnerRefusal, ConfigError)
_OF_TEXTS: tuple[type[Exception], ...] = (UserCodeError, RunError, PolicyError)


def failure_of(error: Exception) -> RoomFailure:
    lacks = {Refusal.MEMORY: "memory", Refusal.DISK: "disk"}.get(code_of(error), "")
    if isinstance(error, ConfigError):
        of_place = next(each for each in _OF_PLACES if isinstance(error, each))
        return RoomFailure(of_place.__name__, _short(error.place, error.problem, error.remedy), lacks)
    if isinstance(error, ProtocolError):
        return RoomFailure(ProtocolError.__name__, _short(error.sender, error.check, error.detail), lacks)
    of_text = next((each for each in _OF_TEXTS if isinstance(error, each)), type(error))
    return RoomFailure(of_text.__name__, _short(error), lacks)


def raise_failure(failed: RoomFailure) -> None:
    """Raise the reported error; an unlisted kind becomes a `RuntimeError`, an internal error of FedSync."""
    causes = {"memory": MemoryError(), "disk": OSError(errno.ENOSPC, "no space")}
    raise _error_of(failed) from causes.get(failed.lacks)


def _error_of(failed: RoomFailure) -> Exception:
    if len(failed.texts) == 3:
        of_three: type[ConfigError | ProtocolError]
        for of_three in (*_OF_PLACES, ProtocolError):
            if failed.kind == of_three.__name__:
                return of_three(*(text[:_MOST_REASON] for text in failed.texts))
    text = " ".join(failed.texts)[:_MOST_REASON]
    kind = next((each for each in _OF_TEXTS if each.__name__ == failed.kind), None)
    return RuntimeError(f"{failed.kind}: {text}") if kind is None else kind(text)


def _short(*texts: object) -> tuple[str, ...]:
    return tuple(foreign.shown(" ".join(printed(text)[:_MOST_REASON].split())) for text in texts)
