"""The run's memory: every batch of events with the actions and the reason that followed.

A journal is JSON lines. The first line is a header (what is needed to build the coordinator again),
every other line one `JournalEntry`. Floats are written so that they read back exactly (a refused
report's NaN, which JSON lacks, as text), so a journal replays to the same actions, and two runs that did the same have
the same bytes.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TextIO

from fedsync.core import actions as action_types
from fedsync.core import events as event_types
from fedsync.core.actions import Action
from fedsync.core.errors import FedSyncError
from fedsync.core.events import Event
from fedsync.core.orders import fast_dataclass

JOURNAL = "journal.jsonl"
"""Name of the file in a run's folder."""


@fast_dataclass
@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One call of the coordinator.

    Args:
        at_s: seconds since the run began.
        events: what had happened.
        actions: what was decided.
        reason: why, for people.
    """

    at_s: float
    events: tuple[Event, ...]
    actions: tuple[Action, ...]
    reason: str


class Handler(Protocol):
    """What can be replayed: a `Coordinator`."""

    def handle(self, events: Iterable[Event], now_s: float) -> JournalEntry:
        """Absorb a batch of events and decide."""


class JournalWriter:
    """Appends entries to a file, one line each, flushed so that a reader can follow.

    Args:
        path: of the file.
        header: its first line; None continues a journal that is there.
    """

    def __init__(self, path: Path, header: Mapping[str, Any] | None) -> None:
        self._file: TextIO = path.open("a" if header is None else "w", encoding="utf-8")
        if header is not None:
            self._write(dict(header))

    def append(self, entry: JournalEntry) -> None:
        self._write(encode(entry))

    def position(self) -> int:
        """Bytes written so far; they are on disk when this returns."""
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        self._file.close()

    def _write(self, value: object) -> None:
        self._file.write(json.dumps(value, allow_nan=False, separators=(",", ":")) + "\n")
        self._file.flush()


def read_journal(path: Path) -> tuple[dict[str, Any], Iterator[JournalEntry]]:
    """Header and entries of a journal file.

    Raises:
        FedSyncError: the file is not a journal; names the line.
    """
    lines = _json_lines(path)
    header = next(lines, None)
    if not isinstance(header, dict):
        raise FedSyncError(f"{path}: not a journal: its first line is not a header")
    return header, _entries(path, lines)


def _entries(path: Path, lines: Iterator[Any]) -> Iterator[JournalEntry]:
    for number, line in enumerate(lines, start=2):
        try:
            yield decode(JournalEntry, line)
        except (TypeError, KeyError, AttributeError) as error:
            raise FedSyncError(f"{path}, line {number}: not a journal line: {error!r}") from error


def _json_lines(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield json.loads(line)
            except ValueError as error:
                raise FedSyncError(f"{path}, line {number}: not a journal line: {error}") from error


def replay(entries: Iterable[JournalEntry], coordinator: Handler) -> Iterator[JournalEntry]:
    """Feed recorded events to a fresh coordinator and yield what it decides now.

    The result equals ``entries`` if and only if the coordinator is the one that wrote them.
    """
    for entry in entries:
        yield coordinator.handle(entry.events, entry.at_s)


_KINDS: dict[str, type] = {
    kind.__name__: kind for union in (event_types.Event, action_types.Action) for kind in typing.get_args(union)
}


def encode(value: Any) -> Any:
    """A value of the core types as plain JSON values; events and actions carry their ``type``."""
    if dataclasses.is_dataclass(value):
        kind: Any = type(value)
        fields = {name: encode(getattr(value, name)) for name in _field_types(kind)}
        return {"type": kind.__name__, **fields} if kind.__name__ in _KINDS else fields
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    return value


def decode(kind: Any, value: Any) -> Any:
    """The inverse of `encode` for a value of type ``kind``."""
    return _decoder(kind)(value)


@cache
def _field_types(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


@cache
def _decoder(kind: Any) -> Callable[[Any], Any]:
    """Build the decoder of a type once: the type hints of the core types are its schema."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        concrete = [argument for argument in arguments if argument is not type(None)]
        if len(concrete) > 1:
            return lambda value: _decoder(_KINDS[value["type"]])(value)
        inner = _decoder(concrete[0])
        return lambda value: None if value is None else inner(value)
    if origin is tuple:
        item = _decoder(arguments[0])
        return lambda value: tuple(item(part) for part in value)
    if origin is Mapping:
        part_of = _decoder(arguments[1])
        return lambda value: {key: part_of(part) for key, part in value.items()}
    if dataclasses.is_dataclass(kind):
        parts = {name: _decoder(hint) for name, hint in _field_types(typing.cast(type, kind)).items()}
        build = typing.cast(Callable[..., Any], kind)
        # Fields that a journal does not know yet have their defaults.
        return lambda value: build(**{name: part(value[name]) for name, part in parts.items() if name in value})
    if kind is float:
        return float
    return lambda value: value
