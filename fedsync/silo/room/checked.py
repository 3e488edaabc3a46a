"""Checks of a training process's messages, and its errors as the session raises them.

A user's code runs in the process, and its messages may reach the server. Errors are of a closed list of kinds, which
carry only texts.
"""

from __future__ import annotations

import errno
import re

from fedsync.common import foreign
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
from fedsync.core.orders import WorkOrder
from fedsync.model.layout import Layout
from fedsync.silo.owner.refusals import code_of, printed
from fedsync.silo.protocol import Refusal
from fedsync.silo.room.room_messages import (
    OrderDone,
    OrderProgress,
    RoomFailure,
    RoomReply,
    RoomRequest,
    TrainerBuilt,
    TrainOrder,
)

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


def checked_progress(asked: RoomRequest, told: OrderProgress) -> OrderProgress:
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
        raise RunError(f"the training process says what cannot be of its {what}")


_MOST_TEXT = 4000
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
                return of_three(*(text[:_MOST_TEXT] for text in failed.texts))
    text = " ".join(failed.texts)[:_MOST_TEXT]
    kind = next((each for each in _OF_TEXTS if each.__name__ == failed.kind), None)
    return RuntimeError(f"{failed.kind}: {text}") if kind is None else kind(text)


def _short(*texts: object) -> tuple[str, ...]:
    return tuple(foreign.shown(" ".join(printed(text)[:_MOST_TEXT].split())) for text in texts)
