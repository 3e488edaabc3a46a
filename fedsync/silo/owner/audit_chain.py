"""Lines of a silo's audit log: canonical JSON, each with its own digest and that of the line before.

| key | what |
|---|---|
| ``n`` | number of the line, from 1 on |
| ``at`` | when, ISO 8601 in UTC |
| ``before`` | digest of the line before; zeros in the first |
| ``digest`` | SHA-256 of the line without this key |
| ``kind`` | what the line is about; the rest goes by it |

The log is files of numbered names that are read one after the other: the chain goes through all of them. Where the
oldest were removed, as the owner's limit says, a later line of the kind ``pruned`` names the first line that is left.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsync.common.errors import FedSyncError

AUDIT = "audit"
"""Folder in a silo's state folder."""

UNWRITTEN = "head.unwritten"
"""File in it as long as the head could not be written off the machine, where the owner wants that."""

FIRST = "0" * 64
"""What the first line has in the place of the digest of the line before."""

MOST_LINE = 16_384
"""Bytes of a line; whatever a peer says is cut to much less."""

_FILE = re.compile(r"audit-([0-9]{6,})\.jsonl")

Fields = Mapping[str, str | int]


class AuditBroken(FedSyncError):
    """An audit log is not what was written; says where, and what is wrong."""


@dataclass(frozen=True, slots=True)
class AuditPlace:
    """Where a silo's log is, and what it may take.

    Args:
        folder: of the log.
        asks: who asks this silo, the server's address.
        bytes: size of a file at which the next one begins.
        keep: files that are kept.
        required: nothing leaves as long as the head cannot be written where the owner wants it.
    """

    folder: str
    asks: str
    bytes: int = 10_000_000
    keep: int = 1000
    required: bool = False


def canonical(fields: Mapping[str, Any]) -> bytes:
    """The one text of an object."""
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode("ascii")


def sealed_line(fields: Fields) -> tuple[bytes, str]:
    """A line with its end, and its digest."""
    digest = hashlib.sha256(canonical(fields)).hexdigest()
    return canonical({**fields, "digest": digest}) + b"\n", digest


def file_name(number: int) -> str:
    return f"audit-{number:06d}.jsonl"


def log_files(folder: Path) -> list[tuple[int, Path]]:
    """The files of a log by number, the oldest first."""
    found = [(match, path) for path in folder.glob("audit-*") if (match := _FILE.fullmatch(path.name))]
    return sorted((int(match[1]), path) for match, path in found)


@dataclass
class AuditReader:
    """Reads a log from its beginning, or on from where it was, and checks every line.

    Args:
        folder: of the log.
        n: number of the last line that was read.
        digest: of it.
        torn: bytes behind the last line that are none: it was being written when the machine stopped, and never said.
        first: number of the first line that there is.
    """

    folder: Path
    n: int = 0
    digest: str = FIRST
    torn: int = 0
    first: int = 0
    _file: int = 0
    _offset: int = 0
    _pruned: int = 1

    def lines(self) -> Iterator[dict[str, Any]]:
        """The lines that have come since.

        Raises:
            AuditBroken: one is not what was written.
        """
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
        if self.first > 1 and self._pruned != self.first:
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
            self._pruned = int(line["first"])
        return line

    def digests(self, wanted: Collection[int]) -> dict[int, str]:
        """Digests of these lines, of those that come; raises as `lines`."""
        found = {}
        for line in self.lines():
            if line["n"] in wanted:
                found[line["n"]] = self.digest
        return found
