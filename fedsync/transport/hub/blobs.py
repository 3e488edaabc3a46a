"""Files of the hub: blobs, which silos download, and uploads from silos.

| state of an upload | until | next state |
|---|---|---|
| expected | its first bytes arrive | begun |
| begun | the connection breaks or is replaced | begun: resumes at the offset on disk |
| begun | the announced length has arrived | whole if the digest is right; else expected, from the beginning |
| whole | the server takes or drops it | deleted |
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from fedsync.common.files import OWNER_FILE, private_folder, write_pieces
from fedsync.model.chunked_arrays import digest, map_file, pieces
from fedsync.model.transfer import Payload
from fedsync.transport.port import Blob


@dataclass(slots=True)
class Upload:
    """Upload of a large answer of at most ``most`` bytes from one silo to the file ``path``. ``writer`` is the number
    of the newest connection; earlier connections must stop. ``gone``: the server has taken or dropped the upload.
    """

    silo: str
    most: int
    path: Path
    writer: int = 0
    whole: bool = False
    gone: bool = False
    digest: str = ""
    idle: asyncio.Event = field(default_factory=asyncio.Event)  # set while no connection sends
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # held in writes: a reported offset stays valid

    def __post_init__(self) -> None:
        self.idle.set()

    def end(self) -> None:
        """Stop all connections of the upload; bytes of a write in progress are deleted."""
        self.writer, self.gone = self.writer + 1, True

    @property
    def there(self) -> int:
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0


class Blobs:
    """Blobs and uploads of one run, in subfolders of the hub's ``folder`` that each server process empties first."""

    def __init__(self, folder: Path) -> None:
        self._blobs, self._uploads = private_folder(folder / "blobs"), private_folder(folder / "uploads")
        for old in (*self._blobs.iterdir(), *self._uploads.iterdir()):
            old.unlink()
        self._sizes: dict[str, int] = {}
        self._expected: dict[str, Upload] = {}

    def publish(self, payload: Payload) -> Blob:
        name = digest(payload).hex()
        if name not in self._sizes:
            write_pieces(self._blobs / name, pieces(payload), OWNER_FILE, settle=False)
            self._sizes[name] = payload.nbytes
        return Blob(name, payload.nbytes)

    def find(self, name: str) -> tuple[Path, int] | None:
        size = self._sizes.get(name)
        return None if size is None else (self._blobs / name, size)

    def keep(self, digests: Collection[str]) -> None:
        """Delete all other blobs; running downloads of these still complete."""
        for unused in self._sizes.keys() - set(digests):
            del self._sizes[unused]
            (self._blobs / unused).unlink(missing_ok=True)

    def expect(self, silo: str, most: int) -> str:
        ticket = secrets.token_hex(16)
        self._expected[ticket] = Upload(silo, most, self._uploads / ticket)
        return ticket

    def upload(self, ticket: str, silo: str) -> Upload | None:
        found = self._expected.get(ticket)
        return found if found is not None and found.silo == silo else None

    def take(self, ticket: str, silo: str) -> Payload | None:
        """Return a complete upload, uint8, as a map whose file is deleted with it; None if it is incomplete."""
        found = self.upload(ticket, silo)
        if found is None or not found.whole:
            return None
        del self._expected[ticket]
        found.end()
        return map_file(found.path, remove=True)

    def forget(self, ticket: str) -> None:
        found = self._expected.pop(ticket, None)
        if found is not None:
            found.end()
            found.path.unlink(missing_ok=True)
