"""Line format of a silo's audit log: canonical JSON, each line with its own digest and the digest of the line before.

| key | content |
|---|---|
| ``n`` | number of the line, from 1 on |
| ``at`` | time, ISO 8601 in UTC |
| ``before`` | digest of the line before; zeros in the first |
| ``digest`` | SHA-256 of the line without this key |
| ``kind`` | kind of the line, which determines the other keys |

The log consists of numbered files, and the chain runs through all of them. The owner's limit may remove the oldest
files. A later line of kind ``pruned`` then names the first remaining line.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsync.common.errors import FedSyncError
from fedsync.common.files import OWNER_FILE

AUDIT = "audit"

UNWRITTEN = "head.unwritten"  # marks that the head cannot be written off the machine, where the owner requires it

FIRST = "0" * 64  # value of ``before`` in the first line

MOST_LINE = 16_384  # bytes; texts of peers are cut much shorter

_FILE = re.compile(r"audit-([0-9]{6,})\.jsonl")

Fields = Mapping[str, str | int]


class AuditBroken(FedSyncError):
    """Error of a damaged audit log."""


@dataclass(frozen=True, slots=True)
class AuditPlace:
    """Location and limits of a silo's log: ``asks`` is the server's address, ``bytes`` the size at which a new file
    begins, ``keep`` the number of files. If ``required``, nothing leaves the silo while the head cannot be written
    where the owner wants it.
    """

    folder: str
    asks: str
    bytes: int = 10_000_000
    keep: int = 1000
    required: bool = False


def canonical(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode("ascii")


def sealed_line(fields: Fields) -> tuple[bytes, str]:
    digest = hashlib.sha256(canonical(fields)).hexdigest()
    return canonical({**fields, "digest": digest}) + b"\n", digest


def append_line(path: Path, line: bytes, size: int) -> None:
    """Append a line durably to a file of ``size`` bytes; if that fails, restore the file and raise `OSError`."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, OWNER_FILE)
    try:
        if os.write(descriptor, line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fdatasync(descriptor)
    except OSError:
        os.ftruncate(descriptor, size)
        raise
    finally:
        os.close(descriptor)


def file_name(number: int) -> str:
    return f"audit-{number:06d}.jsonl"


def log_files(folder: Path) -> list[tuple[int, Path]]:
    found = list[tuple[int, Path]]()
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if match := _FILE.fullmatch(entry.name):
                if not entry.is_file(follow_symlinks=False):
                    raise AuditBroken(f"{entry.name} is no plain file")
                found.append((int(match[1]), folder / entry.name))
    return sorted(found)


@dataclass
class AuditReader:
    """Reader of a log, from its beginning or from its last position; checks every line. ``n`` and ``digest`` are those
    of the last line read, ``first`` is the number of the first existing line. ``torn`` is the size of an incomplete
    last line, whose answer never left.
    """

    folder: Path
    n: int = 0
    digest: str = FIRST
    torn: int = 0
    first: int = 0
    _file: int = 0
    _offset: int = 0
    _pruned: int = 1

    @property
    def behind(self) -> bool:
        """Whether the file of the last line read was removed, as the owner's limit may do."""
        return self._file > 0 and not (self.folder / file_name(self._file)).exists()

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the lines since the last read; raise `AuditBroken` if a line was changed or removed."""
        self.torn = 0
        numbers = [number for number, _ in log_files(self.folder)]
        if self._file and self._file not in numbers:
            raise AuditBroken(f"{file_name(self._file)} is gone")
        ahead = [number for number in numbers if number >= self._file]
        if ahead and ahead != list(range(ahead[0], ahead[0] + len(ahead))):
            raise AuditBroken(f"a file between {file_name(ahead[0])} and {file_name(ahead[-1])} is gone")
        for number in ahead:
            if number != self._file:
                self._file, self._offset = number, 0
            yield from self._lines_of(number, last=number == ahead[-1])
        if self.first > 1 and self._pruned < self.first:
            raise AuditBroken(f"it begins with line {self.first}, and no line says that those before were removed")

    def _lines_of(self, number: int, *, last: bool) -> Iterator[dict[str, Any]]:
        path = self.folder / file_name(number)
        with path.open("rb") as file:
            if file.seek(0, 2) < self._offset:
                raise AuditBroken(f"{path.name} has become shorter")
            file.seek(self._offset)
            while raw := file.readline(MOST_LINE + 1):
                if not raw.endswith(b"\n"):
                    if not last or len(raw) > MOST_LINE:
                        raise AuditBroken(f"{path.name} ends in the middle of line {self.n + 1}")
                    self.torn = len(raw)
                    return
                line = self._checked(raw, path.name)
                self._offset += len(raw)
                yield line

    def _checked(self, raw: bytes, name: str) -> dict[str, Any]:
        place = f"{name}, line {self.n + 1} of the log" if self.n else f"{name}, its first line"
        try:
            line: dict[str, Any] = json.loads(raw)
            digest = line.pop("digest")
            n, before = line["n"], line["before"]
            same = sealed_line(line) == (raw, digest)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise AuditBroken(f"{place}: it is damaged") from None
        if not same or type(n) is not int:
            raise AuditBroken(f"{place}: it was changed")
        if self.n == 0:
            self.first = n
            fits = n > 1 or before == FIRST
        else:
            fits = (n, before) == (self.n + 1, self.digest)
        if not fits:
            raise AuditBroken(f"{place}: it does not follow the line before")
        self.n, self.digest = n, digest
        if line.get("kind") == "pruned":
            if type(line.get("first")) is not int:
                raise AuditBroken(f"{place}: it was changed")
            self._pruned = line["first"]
        return line

    def digests(self, wanted: Collection[int]) -> dict[int, str]:
        found = {}
        for line in self.lines():
            if line["n"] in wanted:
                found[line["n"]] = self.digest
        return found
