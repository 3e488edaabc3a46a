"""Lockout of a silo after three integrity failures: a forger gets three answers instead of thousands.

The count of failures belongs to one key epoch. It is on disk beside the keys before the answer leaves, so no restart or
other run resets it. A second file, the marker, shows that a count was made. For keys in memory, the count is in memory.

| count | marker | state of the silo |
|---|---|---|
| of this epoch, below the limit | exists | open |
| of this epoch, at the limit | exists | locked |
| of another group, and not of a later epoch | exists | open, from zero: old forgeries disclose nothing about new keys |
| missing, damaged or of a later epoch | exists | locked: the count was removed, or old keys were restored |
| readable | missing | the count applies, and the marker is created |
| missing | missing | new: count and marker are created |

`unlock` resets the count to zero in every state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from fedsync.common import codec, foreign
from fedsync.common.errors import ConfigError, SiloLocked
from fedsync.common.files import read_private, write_private, writing
from fedsync.common.locks import taken

if TYPE_CHECKING:
    from fedsync.cipher.keys.keyring import Ring

logger = foreign.logger(__name__)

LIMIT = 3  # integrity failures in one key epoch after which a silo is locked

COUNT, MARKER = "integrity.json", "integrity.kept"  # files in the folder of keys

_LOCK, _TURN = "integrity.lock", "integrity.turn"
_MAX_BYTES = 2**16
_MOST_REASON = 1000


@dataclass(frozen=True, slots=True)
class IntegrityFailure:
    """Integrity failure; ``at`` is its time in ISO 8601."""

    at: str
    reason: str


@dataclass(frozen=True, slots=True)
class IntegrityCount:
    """Integrity failures in the epoch ``epoch`` of the group ``group`` (its fingerprint, hexadecimal)."""

    epoch: int
    group: str
    failures: tuple[IntegrityFailure, ...] = ()


class Lockout:
    """Integrity failures of one silo over all of its runs, counted beside its keys, or in memory like the keys.
    `ConfigError` if the folder is not writable, so that failures could not be counted.
    """

    def __init__(self, ring: Ring) -> None:
        self._folder = ring.folder
        self._none = IntegrityCount(ring.group.epoch, ring.group.fingerprint.hex())
        self._memory = self._none
        self._uncounted: str | None = None
        with self._held() as folder:
            if folder is not None and not (folder / MARKER).exists():
                if not (folder / COUNT).exists():
                    self._write(self._none)
                write_private(folder / MARKER, b"")

    def check(self) -> None:
        """Raise `SiloLocked` if the silo is locked, or if the count cannot be read."""
        if self._uncounted is not None:
            self.count(self._uncounted)
        try:
            failures = self._read().failures
        except (ConfigError, ValueError) as error:
            raise SiloLocked(f"failures of integrity cannot be read: {error}. {_REMEDY}") from None
        if len(failures) >= LIMIT:
            last = failures[-1]
            raise SiloLocked(f"{len(failures)} failures of integrity, the last at {last.at}: {last.reason}. {_REMEDY}")

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Serialize messages over all trainers of the silo, from the check to the count; raises as `check`. Without
        this lock, a server that asks many trainers at once could test many forgeries before the lockout.
        """
        with self._held(_TURN):
            self.check()
            yield

    def count(self, reason: str) -> None:
        """Count a failure durably. If that fails, raise `SiloLocked`, and answer nothing until it can be counted."""
        failure = IntegrityFailure(datetime.now(UTC).isoformat(timespec="seconds"), reason[:_MOST_REASON])
        self._uncounted = failure.reason
        try:
            with self._held():
                counted = self._read()
                self._write(replace(counted, failures=(*counted.failures, failure)[-LIMIT:]))
        except (ConfigError, ValueError, OSError) as error:
            raise SiloLocked(f"a failure of integrity ({failure.reason}) could not be counted: {error}") from None
        self._uncounted = None

    def unlock(self) -> tuple[IntegrityFailure, ...] | None:
        """Reset the count; return the earlier failures, or None if unreadable. `ConfigError` if not writable."""
        with self._held():
            try:
                happened = self._read().failures
            except (ConfigError, ValueError):
                happened = None
            self._write(self._none)
        self._uncounted = None
        return happened

    @contextmanager
    def _held(self, lock: str = _LOCK) -> Iterator[Path | None]:
        if self._folder is None:
            yield None
            return
        path = self._folder / lock
        with writing(path, "Give the silo write access to its key folder, which encrypted runs need"):
            path.touch()
        with taken(path, inf):
            yield self._folder

    def _read(self) -> IntegrityCount:
        if self._folder is None:
            return self._memory
        counted: IntegrityCount = codec.loads(IntegrityCount, read_private(self._folder / COUNT, _MAX_BYTES), own=True)
        if counted.group == self._none.group:
            return counted
        if counted.epoch > self._none.epoch:
            raise ConfigError(str(self._folder / COUNT), f"epoch {counted.epoch} is later than the keys", _REMEDY)
        return self._none

    def _write(self, counted: IntegrityCount) -> None:
        if self._folder is None:
            self._memory = counted
        else:
            write_private(self._folder / COUNT, codec.dumps(counted).encode())


_REMEDY = "The silo takes no part until its owner says `fedsync silo unlock --silo silo.yaml`"
