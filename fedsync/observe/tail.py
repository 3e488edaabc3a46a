"""Follow the journal of a run while another process writes it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedsync.common.errors import FedSyncError
from fedsync.core.journal import JournalEntry, read_entry, read_header


class Tail:
    """New entries of a journal that may still grow.

    A last line that is not complete is left for the next call, so that the journal of a run that was killed reads
    as far as it goes.

    Args:
        path: a ``journal.jsonl``; it need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._line = 0
        self.header: dict[str, Any] | None = None

    def entries(self) -> Iterator[JournalEntry]:
        """Entries written completely since the last call. The header comes first, in ``header``.

        Raises:
            FedSyncError: the file is not a journal; names the line.
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
