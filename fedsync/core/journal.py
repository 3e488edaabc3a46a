"""Journal of a run: log of every batch of events, with the coordinator's actions and reason.

A journal is JSON lines. The first line is a header with the format number and the data to rebuild the coordinator.
Every other line is one `JournalEntry`, written by `fedsync.common.codec`. Equal runs have equal bytes.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TextIO

from fedsync.common import codec
from fedsync.common.errors import FedSyncError
from fedsync.core.actions import Action
from fedsync.core.events import Event, OperatorAsked

JOURNAL = "journal.jsonl"

FORMAT = 3
"""Format number. Format 1 had no number, and wrote every default."""


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One call of the coordinator ``at_s`` seconds after the run began; ``reason`` is for users."""

    at_s: float
    events: tuple[Event, ...]
    actions: tuple[Action, ...]
    reason: str

    @property
    def steered(self) -> bool:
        return any(isinstance(event, OperatorAsked) for event in self.events)


class Handler(Protocol):
    """Protocol of a replay target: a `Coordinator`."""

    def handle(self, events: Iterable[Event], now_s: float) -> JournalEntry: ...


class JournalWriter:
    """Writer that appends one line an entry and flushes it for readers; ``header`` None continues a journal."""

    def __init__(self, path: Path, header: Mapping[str, Any] | None) -> None:
        self._file: TextIO = open_private(path, "a" if header is None else "w")
        if header is not None:
            self._write(json.dumps({"format": FORMAT, **header}, allow_nan=False, separators=(",", ":")))

    def append(self, entry: JournalEntry) -> None:
        self._write(codec.dumps(entry))

    def position(self) -> int:
        """Return the size of the file in bytes, all of which survives the end of this process."""
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        self._file.close()

    def _write(self, line: str) -> None:
        self._file.write(line + "\n")
        self._file.flush()


def open_private(path: Path, mode: Literal["a", "w"] = "w", newline: str | None = None) -> TextIO:
    """Open a text file for writing with mode 0600, because journals hold silos' own statements."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_APPEND if mode == "a" else os.O_TRUNC)
    descriptor = os.open(path, flags, 0o600)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.fchmod(descriptor, 0o600)  # an existing file may have had wider permissions
    return os.fdopen(descriptor, mode, encoding="utf-8", newline=newline)


def read_journal(path: Path) -> tuple[dict[str, Any], Iterator[JournalEntry]]:
    """Read header and entries of a journal; raise FedSyncError, naming the line, if anything is invalid."""
    lines = _lines(path)
    header = read_header(path, next(lines, b""))
    return header, (read_entry(path, number, line) for number, line in enumerate(lines, start=2))


def read_header(path: Path, line: bytes) -> dict[str, Any]:
    try:
        header = json.loads(line)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise FedSyncError(f"{path}: not a journal: its first line is not a header")
    found = header.get("format", 1)
    if found != FORMAT:
        by = f", written by FedSync {header['fedsync']!s:.20}" if "fedsync" in header else ""
        raise FedSyncError(
            f"{path}: a journal of format {found!r:.20}{by}; this FedSync reads format {FORMAT} only. "
            "Read it with the FedSync that wrote it"
        )
    return header


def read_entry(path: Path, number: int, line: bytes) -> JournalEntry:
    try:
        entry: JournalEntry = codec.loads(JournalEntry, line, own=True)
    except codec.DecodeError as error:
        raise FedSyncError(f"{path}, line {number}: not a journal line: {error}") from error
    return entry


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from file


def replay(entries: Iterable[JournalEntry], coordinator: Handler) -> Iterator[JournalEntry]:
    """Feed recorded events to a fresh coordinator and yield its entries: the same as ``entries`` if decisions agree."""
    for entry in entries:
        yield coordinator.handle(entry.events, entry.at_s)
