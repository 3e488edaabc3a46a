"""Large payloads as files on the server's machine, beside Flower's messages.

A *parcel* is a payload in a file. The ServerApp publishes it under its SHA-256, and sends silos its name and size only;
they fetch it at the server's gate. The other way it writes down that a silo's node may upload, and how much; the silo
uploads to the gate, and answers with the size of what it left there. The ServerApp then has it as a map of the file.
So neither the SuperLink nor a socket, nor a message, ever holds a whole model.

| file, in the folder of parcels | written by | goes |
|---|---|---|
| ``SESSION/lock`` | the ServerApp, which holds a lock on it as long as it lives | with its session |
| ``SESSION/DIGEST`` | the ServerApp | when no message speaks of it any more |
| ``SESSION/node-NUMBER/TICKET`` | the ServerApp: the most bytes that may come | with the answer, or if nobody waits |
| ``SESSION/node-NUMBER/TICKET.CONTENT`` | the gate | the same; what is mapped goes with its map |

A session is one process of a ServerApp. Whoever begins another, and each SuperLink that starts, removes those whose
process is gone. The folder is the gate's whole memory of what may be up- or downloaded: a SuperLink that is started
again goes on with what is there. `fedsync.flower.internals.parcel_routes` has the gate's side,
`fedsync.flower.internals.parcel_client` the silo's.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from fedsync.common.files import OWNER_FOLDER, private_folder
from fedsync.common.locks import held, taken
from fedsync.core import foreign
from fedsync.core.errors import ConfigError, ProtocolError
from fedsync.core.spans import digest, link_file, map_file, pieces
from fedsync.core.transfer import Payload

logger = foreign.logger(__name__)

PARCELS = "FEDSYNC_PARCELS"
"""Environment variable of a ServerApp: the folder of parcels, where a gate serves them."""

FOLDER = "parcels"
"""Name of the folder, in the server's state folder."""

_LOCK = "lock"
_TIDY_S = 10.0
_SESSION_BYTES, _NAME_BYTES = 8, 16


@dataclass(frozen=True, slots=True)
class Parcel:
    """A payload that waits at the gate: whose session's, its SHA-256, its bytes."""

    session: str
    digest: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Ticket:
    """Leave to upload one payload."""

    session: str
    name: str


@dataclass(frozen=True, slots=True)
class Uploaded:
    """A payload that was left at the gate: what tells it from another under the same ticket, its bytes."""

    content: str
    nbytes: int


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Be the only one who begins a session or removes one."""
    with taken(root / _LOCK, _TIDY_S) as alone:
        if not alone:
            raise ConfigError(str(root), "somebody else tidies it up, and does not end", "End that process")
        yield


def tidy_up(root: Path) -> None:
    """Remove the sessions whose process is gone."""
    with _alone(private_folder(root)):
        _remove_left(root)


def _remove_left(root: Path) -> None:
    for session in root.iterdir():
        if session.is_dir() and not held(session / _LOCK):
            shutil.rmtree(session, ignore_errors=True)


def node_folder(session: Path, node: int) -> Path:
    """Where a node's tickets are."""
    return session / f"node-{node}"


class ParcelStore:
    """A ServerApp's session.

    Args:
        folder: of the session.
        lock: descriptor of its locked file; the lock ends with this process.
    """

    def __init__(self, folder: Path, lock: int) -> None:
        self._folder = folder
        self._lock = lock
        self._published: set[str] = set()
        self._expected: dict[tuple[int, str], int] = {}

    @classmethod
    def begin(cls, root: Path) -> Self:
        """Begin a session, and remove those that are over.

        Raises:
            ConfigError: the folder is open to others, or nothing can be written there.
        """
        private_folder(root)
        try:
            with _alone(root):
                _remove_left(root)
                folder = root / secrets.token_hex(_SESSION_BYTES)
                folder.mkdir(mode=OWNER_FOLDER)
                lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
                fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            problem = f"no parcels can be kept here: {error.strerror}"
            raise ConfigError(str(root), problem, "Check the folder and the disk") from error
        return cls(folder, lock)

    @classmethod
    @contextmanager
    def here(cls) -> Iterator[Self | None]:
        """A session of this process, where a gate serves parcels; None elsewhere, and where nothing can be written."""
        root, store = os.environ.get(PARCELS), None
        if root:
            try:
                store = cls.begin(Path(root))
            except ConfigError as error:
                logger.warning("models travel in Flower's messages: %s", error)
        try:
            yield store
        finally:
            if store is not None:
                store.end()

    @property
    def session(self) -> str:
        return self._folder.name

    # What goes out.

    def publish(self, payload: Payload) -> Parcel | None:
        """Lay a payload ready, which is linked where it is a file already; None where the disk takes nothing."""
        unfinished = self._folder / f".{secrets.token_hex(4)}"
        try:
            name = digest(payload).hex() if link_file(payload, unfinished) else _written(unfinished, payload)
            unfinished.rename(self._folder / name)
        except OSError as error:
            logger.warning("a model travels in Flower's messages, for %s takes no more: %s", self._folder, error)
            return None
        finally:
            unfinished.unlink(missing_ok=True)  # it stays if it is another name of the same file
        self._published.add(name)
        return Parcel(self.session, name, payload.nbytes)

    # What comes in.

    def expect(self, node: int, what: str, most: int) -> Ticket | None:
        """Let a node upload one payload; asked twice, it is the same ticket. None where the disk takes nothing.

        Args:
            node: of the silo.
            what: it is the answer to; the ticket's name says nothing of it.
            most: bytes that it may have.
        """
        name = hashlib.sha256(f"{self.session}/{node}/{what}".encode()).hexdigest()[: 2 * _NAME_BYTES]
        if (node, name) not in self._expected:
            folder = node_folder(self._folder, node)
            try:
                folder.mkdir(mode=OWNER_FOLDER, exist_ok=True)
                (folder / name).write_text(str(most))
            except OSError as error:
                logger.warning("an update travels in Flower's messages, for %s takes no more: %s", folder, error)
                return None
            self._expected[node, name] = most
        return Ticket(self.session, name)

    def arrived(self, node: int, ticket: Ticket, uploaded: Uploaded, sender: str) -> Payload:
        """What a node has uploaded, uint8, as a map of the file, which goes with it.

        Raises:
            ProtocolError: it was not expected, is not all there, or is larger than it may be.
        """
        most = self._expected.get((node, ticket.name))
        if most is None:
            raise ProtocolError(sender, "upload", "nobody expects it")
        if not 0 < uploaded.nbytes <= most:
            raise ProtocolError(sender, "length", f"{uploaded.nbytes} bytes, at most {most}")
        path = upload_path(node_folder(self._folder, node), ticket.name, uploaded.content)
        try:
            kept, size = _taken_over(path)
            if size != uploaded.nbytes:
                kept.unlink()
                raise ProtocolError(sender, "upload", f"it says that it left {uploaded.nbytes} bytes, and left {size}")
            payload = map_file(kept, remove=True)
        except OSError as error:
            raise ProtocolError(sender, "upload", f"it is not there: {error.strerror}") from error
        self._withdraw(node, ticket.name)
        return payload

    def keep(self, digests: Collection[str], tickets: Collection[tuple[int, str]]) -> None:
        """Remove what is published, or expected, beside these."""
        for name in self._published - set(digests):
            (self._folder / name).unlink(missing_ok=True)
            self._published.discard(name)
        for node, name in self._expected.keys() - set(tickets):
            self._withdraw(node, name)

    def _withdraw(self, node: int, name: str) -> None:
        del self._expected[node, name]
        folder = node_folder(self._folder, node)
        (folder / name).unlink(missing_ok=True)
        for partial in folder.glob(f"{name}.*"):
            partial.unlink(missing_ok=True)

    def end(self) -> None:
        """Remove all of it; what is mapped stays readable."""
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock)


def _written(path: Path, payload: Payload) -> str:
    """Its SHA-256, hexadecimal."""
    hashed = hashlib.sha256()
    with path.open("wb") as file:
        for piece in pieces(payload):
            hashed.update(piece)
            file.write(piece)
    return hashed.hexdigest()


def _taken_over(upload: Path) -> tuple[Path, int]:
    """The file of an upload under another name, and its bytes: nobody writes it any more, however long he was at it."""
    kept = upload.with_name(f"kept-{secrets.token_hex(_NAME_BYTES)}")
    upload.rename(kept)
    with kept.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until `still_written` has ended, which finds the name gone from now on
        return kept, os.fstat(file.fileno()).st_size


@contextmanager
def still_written(upload: Path, descriptor: int) -> Iterator[bool]:
    """Whether an open file is still an upload that nobody took over or withdrew; it stays so in the meantime."""
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    try:
        yield upload.exists() and os.path.samestat(upload.stat(), os.fstat(descriptor))
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def upload_path(folder: Path, ticket: str, content: str) -> Path:
    """File of what comes under a ticket, in the node's folder."""
    return folder / f"{ticket}.{content}"
