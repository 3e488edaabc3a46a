"""What lies on the hub's disk: blobs, which silos fetch, and uploads, which silos leave.

| an upload is | until | then |
|---|---|---|
| expected | its first bytes come | begun |
| begun | a line breaks, or another takes its place | begun: it goes on at the offset that is on disk |
| begun | it has the length that was said | whole if the digest is right; else expected, from the beginning |
| whole | the server takes it, or forgets it | gone from here |
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from fedsync.common.files import OWNER_FILE, private_folder, write_pieces
from fedsync.model.chunked_arrays import map_file, spans
from fedsync.model.transfer import Payload
from fedsync.transport.questions import Blob


@dataclass(slots=True)
class Upload:
    """A large answer on its way.

    Args:
        silo: who may leave it.
        most: bytes that it may have.
        path: where it is written.
    """

    silo: str
    most: int
    path: Path
    writer: int = 0
    """The connection that counts: the newest."""
    whole: bool = False
    gone: bool = False
    """Taken or forgotten."""
    digest: str = ""
    idle: asyncio.Event = field(default_factory=lambda: _set(asyncio.Event()))
    """Set while no connection sends."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while bytes are written, so that an offset that was told stays true."""

    def end(self) -> None:
        """Have no connection go on with it; what one writes at this moment goes with it."""
        self.writer, self.gone = self.writer + 1, True

    @property
    def there(self) -> int:
        """Bytes that are on disk."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0


class Blobs:
    """Those of one run.

    Args:
        folder: of the hub's, made anew: nothing in it outlives the server's process.
    """

    def __init__(self, folder: Path) -> None:
        self._blobs, self._uploads = private_folder(folder / "blobs"), private_folder(folder / "uploads")
        for old in (*self._blobs.iterdir(), *self._uploads.iterdir()):
            old.unlink()
        self._sizes: dict[str, int] = {}
        self._expected: dict[str, Upload] = {}

    def publish(self, payload: Payload) -> Blob:
        """Lay bytes down for silos to fetch; the same bytes once."""
        data = payload.data.cast("B")
        digest = hashlib.sha256(data).hexdigest()
        if digest not in self._sizes:
            pieces = (data[start:stop] for start, stop in spans(len(data), 1))
            write_pieces(self._blobs / digest, pieces, OWNER_FILE, settle=False)
            self._sizes[digest] = len(data)
        return Blob(digest, self._sizes[digest])

    def find(self, digest: str) -> tuple[Path, int] | None:
        """File and size of a blob; None if there is none."""
        size = self._sizes.get(digest)
        return None if size is None else (self._blobs / digest, size)

    def keep(self, digests: Collection[str]) -> None:
        """Remove all other blobs; who is fetching one has it still."""
        for digest in self._sizes.keys() - set(digests):
            del self._sizes[digest]
            (self._blobs / digest).unlink(missing_ok=True)

    def expect(self, silo: str, most: int) -> str:
        """Let a silo leave one answer of so many bytes; returns the ticket."""
        ticket = secrets.token_hex(16)
        self._expected[ticket] = Upload(silo, most, self._uploads / ticket)
        return ticket

    def upload(self, ticket: str, silo: str) -> Upload | None:
        """The upload of a ticket, if it is this silo's."""
        found = self._expected.get(ticket)
        return found if found is not None and found.silo == silo else None

    def take(self, ticket: str, silo: str) -> Payload | None:
        """What a silo has left, uint8, a map of a file that goes with it; None where it is not whole."""
        found = self.upload(ticket, silo)
        if found is None or not found.whole:
            return None
        del self._expected[ticket]
        found.end()
        return map_file(found.path, remove=True)

    def forget(self, ticket: str) -> None:
        """Nobody waits for this upload any more."""
        found = self._expected.pop(ticket, None)
        if found is not None:
            found.end()
            found.path.unlink(missing_ok=True)


def _set(event: asyncio.Event) -> asyncio.Event:
    event.set()
    return event
