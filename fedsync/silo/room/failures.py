"""Errors of a training process as its session raises them: a closed list of kinds, which carry only texts."""

from __future__ import annotations

import errno

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
from fedsync.silo.owner.refusals import code_of, printed
from fedsync.silo.protocol import Refusal
from fedsync.silo.room.room_messages import RoomFailure

_MOST_TEXT = 4000
_OF_PLACES: tuple[type[ConfigError], ...] = (HugeModel, Diverged, LimitReached, OwnerRefusal, ConfigError)
_OF_TEXTS: tuple[type[Exception], ...] = (UserCodeError, RunError, PolicyError)


def failure_of(error: Exception) -> RoomFailure:
    lacks = {Refusal.MEMORY: "memory", Refusal.DISK: "disk"}.get(code_of(error), "")
    if isinstance(error, ConfigError):
        kind = next(each for each in _OF_PLACES if isinstance(error, each))
        return RoomFailure(kind.__name__, _short(error.place, error.problem, error.remedy), lacks)
    if isinstance(error, ProtocolError):
        return RoomFailure(ProtocolError.__name__, _short(error.sender, error.check, error.detail), lacks)
    for each in _OF_TEXTS:
        if isinstance(error, each):
            return RoomFailure(each.__name__, _short(error), lacks)
    return RoomFailure(type(error).__name__, _short(error), lacks)


def raise_failure(failed: RoomFailure) -> None:
    """Raise the reported error; an unlisted kind becomes a `RuntimeError`, an internal error of FedSync."""
    error = _error_of(failed)
    match failed.lacks:
        case "memory":
            raise error from MemoryError()
        case "disk":
            raise error from OSError(errno.ENOSPC, "no space")
    raise error


def _error_of(failed: RoomFailure) -> Exception:
    for of_place in _OF_PLACES:
        if failed.kind == of_place.__name__ and len(failed.texts) == 3:
            return of_place(*(text[:_MOST_TEXT] for text in failed.texts))
    if failed.kind == ProtocolError.__name__ and len(failed.texts) == 3:
        return ProtocolError(*(text[:_MOST_TEXT] for text in failed.texts))
    text = " ".join(failed.texts)[:_MOST_TEXT]
    kind = next((each for each in _OF_TEXTS if each.__name__ == failed.kind), None)
    return RuntimeError(f"{failed.kind}: {text}") if kind is None else kind(text)


def _short(*texts: object) -> tuple[str, ...]:
    return tuple(foreign.shown(" ".join(printed(text)[:_MOST_TEXT].split())) for text in texts)
