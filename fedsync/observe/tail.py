"""Reader of a journal that another process is still writing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedsync.common.errors import FedSyncError
from fedsync.core.journal import JournalEntry, read_entry, read_header


class Tail:
    """Incremental reader of a growing journal, which need not exist yet. An incomplete last line waits for the next
    call, so the journal of a killed run is readable up to that line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._line = 0
        self.header: dict[str, Any] | None = None

    def entries(self) -> Iterator[JournalEntry]:
        """Yield entries completed since the last call; ``header`` is set before the first entry. Raises `FedSyncError`
        with the line if the file is not a journal, or became shorter.
        """
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            if file.seek(0, 2) < self._offset:
                raise FedSyncError(f"{self._path}: became shorter: another run was begun in this folder")
            file.seek(self._offset)
            while (line := file.readline()).endswith(b"\n"):
                self._offset += len(line)
                self._line += 1
                if self.header is None:
                    self.header = read_header(self._path, line)
                else:
                    yield read_entry(self._path, self._line, line)
