"""The silo's way to parcels: files from the server's gate, and files to it, over the SuperNode's own identity.

A line that breaks is made again, and the transfer goes on from where it was. It ends when nothing moved for
`PATIENCE_S`, or the server says that it is of no use: what was asked for is not there, or not wanted, any more.

It takes address, certificates and signature from the connection that Flower's SuperNode has made, so it serves only the
versions in `fedsync.flower.internals.versions.TESTED`.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import os
import ssl
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from io import FileIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

from fedsync.common.backoff import Backoff
from fedsync.common.proxies import DIRECT, way_to
from fedsync.core import foreign
from fedsync.core.errors import SERVER, ProtocolError, RunError
from fedsync.core.spans import SPAN_BYTES, Hash, digest, file_part, map_file, pieces
from fedsync.core.transfer import Payload
from fedsync.flower.internals.node_proof import share_proofs
from fedsync.flower.internals.parcel_routes import MAX_PART_BYTES, PREFIX
from fedsync.flower.parcels import Parcel, Ticket, Uploaded

logger = foreign.logger(__name__)

TELL_S = 10.0
"""A transfer that takes longer says so often how far it is [s]."""

PATIENCE_S = 120.0
"""How long a transfer is tried for in which nothing moves [s]."""

_PAUSES = Backoff(0.1, 5.0)
_SILENCE_S = 60.0
_LATER = {401, 409, 500, 502, 503, 504}
"""Answers after which the same may work: the server starts, or has too much to do, or another connection was on it."""

_FULL = 507
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}
_WHOLE, _PART = ".parcel", ".part"
_DIGITS = 20

Headers = Mapping[str, str]


class _Answered(Exception):
    """The server answers with a status that is not what was asked for."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(status, text)
        self.status = status
        self.text = text


class Progress:
    """Says in the log how far a long transfer is.

    Args:
        what: is transferred.
        size: of it [bytes].
    """

    def __init__(self, what: str, size: int) -> None:
        self._what, self._size = what, size
        self._began: tuple[float, int] | None = None
        self._told_s = 0.0

    def at(self, done: int) -> None:
        """So many bytes are there."""
        now_s = time.monotonic()
        if self._began is None:
            self._began, self._told_s = (now_s, done), now_s
        if now_s - self._told_s < TELL_S:
            return
        self._told_s = now_s
        pace = (done - self._began[1]) / (now_s - self._began[0])
        left = f"{(self._size - done) / pace:.0f} s left" if pace else "nothing moves"
        logger.info("%s: %.1f of %.1f MB, %.2f MB/s, %s", self._what, done / 1e6, self._size / 1e6, pace / 1e6, left)


class ParcelClient:
    """Fetches and uploads for one SuperNode; it fetches one parcel at a time.

    Args:
        address: of the SuperLink, ``host:port``.
        trust: for TLS; None without.
        sign: headers that prove whose request it is, made for each anew.
    """

    def __init__(self, address: str, trust: ssl.SSLContext | None, sign: Callable[[], Headers]) -> None:
        self._way = way_to(address, os.environ, DIRECT if trust is None else None)
        self._trust = trust
        self._sign = sign
        self._filled: Path | None = None
        self._used: WeakValueDictionary[Path, Payload] = WeakValueDictionary()

    def fetch(self, parcel: Parcel, folder: Path) -> Payload:
        """A parcel, uint8, as a map of a file in ``folder``.

        The file stays as long as what is returned is in use, and until another is fetched, to any folder.

        Raises:
            ProtocolError: the server has no such parcel, or sent something else.
            OSError: it cannot be written.
            RunError: the server cannot be reached.
        """
        whole, part = (folder / f"{parcel.digest}{suffix}" for suffix in (_WHOLE, _PART))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # The server names the runs, and each has its folder: of all of them one has something.
        for each in {self._filled or folder, folder}:
            for other in (*each.glob(f"*{_WHOLE}"), *each.glob(f"*{_PART}")):
                if other not in (whole, part, *self._used):
                    other.unlink(missing_ok=True)
        self._filled = folder
        if whole.exists():  # asked for again; the machine may have failed since it was written
            kept = map_file(whole) if whole.stat().st_size else None
            if kept is not None and digest(kept).hex() == parcel.digest:
                self._used[whole] = kept
                return kept
            whole.unlink()
        try:
            with part.open("a+b", buffering=0) as file:
                hashed = hashlib.sha256()
                file.seek(0)
                while data := file.read(SPAN_BYTES):
                    hashed.update(data)
                path = f"{PREFIX}{parcel.session}/parcels/{parcel.digest}"
                told = Progress("model from the server", parcel.nbytes)
                self._persist(
                    lambda line: _receive(line, path, self._sign(), parcel.nbytes, file, hashed, told), file.tell
                )
            if hashed.hexdigest() != parcel.digest:
                raise ProtocolError(SERVER, "parcel", f"its SHA-256 is {hashed.hexdigest()}, not {parcel.digest}")
            part.rename(whole)
        except RunError:
            raise  # with what is there another try begins
        except _Answered as error:
            part.unlink(missing_ok=True)
            raise ProtocolError(SERVER, "parcel", f"it is answered {error.status}: {error.text}") from error
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        mapped = map_file(whole)
        self._used[whole] = mapped
        return mapped

    def upload(self, ticket: Ticket, payload: Payload) -> Uploaded | None:
        """Leave a payload at the gate; None where the server's disk takes no more.

        Raises:
            ProtocolError: the server does not take it.
            RunError: it cannot be reached.
        """
        path = f"{PREFIX}{ticket.session}/uploads/{ticket.name}/{(content := _content(payload))}"
        there, told = 0, Progress("update to the server", payload.nbytes)

        def send(line: http.client.HTTPConnection) -> None:
            nonlocal there
            line.request("GET", path, headers=dict(self._sign()))
            there = _there(line, payload.nbytes)
            while there < payload.nbytes:
                there = self._send_part(line, path, payload, there, told)

        try:
            self._persist(send, lambda: there)
        except _Answered as error:
            if error.status != _FULL:
                raise ProtocolError(SERVER, "upload", f"it is answered {error.status}: {error.text}") from error
            logger.warning("the server's disk takes no more: the update travels in a message")
            return None
        return Uploaded(content, payload.nbytes)

    def _send_part(
        self, line: http.client.HTTPConnection, path: str, payload: Payload, start: int, told: Progress
    ) -> int:
        stop = min(start + MAX_PART_BYTES, payload.nbytes)
        line.putrequest("PUT", path, skip_accept_encoding=True)
        part = {"Content-Length": str(stop - start), "Content-Range": f"bytes {start}-{stop - 1}/{payload.nbytes}"}
        for name, value in {**self._sign(), **part}.items():
            line.putheader(name, value)
        line.endheaders()
        for piece in pieces(payload.view("uint8")[start:stop]):
            line.send(piece)
            start += len(piece)
            told.at(start)
        there = _there(line, payload.nbytes)
        if there != stop:
            raise ConnectionError(f"the server has {there} bytes, after it was sent {stop}")
        return there

    def _persist(self, transfer: Callable[[http.client.HTTPConnection], None], done: Callable[[], int]) -> None:
        """Try until it is done, or nothing moves; ``done`` is how many bytes did."""
        moved, moved_s, tries = done(), time.monotonic(), 0
        while True:
            line = self._line()
            try:
                transfer(line)
                return
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, OSError) and error.errno in _DISK:
                    raise
                problem: Exception = error
            except _Answered as error:
                if error.status not in _LATER:
                    raise
                problem = error
            finally:
                line.close()
            if done() > moved:
                moved, moved_s, tries = done(), time.monotonic(), 0
            if time.monotonic() - moved_s > PATIENCE_S:
                raise RunError(f"nothing moved in {PATIENCE_S:g} s: {problem}") from problem
            logger.info("a transfer goes on from %d bytes: %s", moved, problem)
            time.sleep(_PAUSES.pause_s(tries))
            tries += 1

    def _line(self) -> http.client.HTTPConnection:
        return self._way.line(self._trust, _SILENCE_S)


def _answer(line: http.client.HTTPConnection, wanted: int) -> http.client.HTTPResponse:
    answer = line.getresponse()
    if answer.status != wanted:
        raise _Answered(answer.status, answer.read(500).decode("utf-8", "replace").strip())
    return answer


def _there(line: http.client.HTTPConnection, most: int) -> int:
    """How many bytes of an upload the server says that it has."""
    told = _answer(line, 200).read(_DIGITS)
    if not told.isdigit() or int(told) > most:
        raise ProtocolError(SERVER, "upload", f"it is said to have {told!r} of {most} bytes")
    return int(told)


def _receive(
    line: http.client.HTTPConnection,
    path: str,
    signed: Headers,
    size: int,
    file: FileIO,
    hashed: Hash,
    told: Progress,
) -> None:
    """Fetch what is missing of a file."""
    if file.tell() == size:
        return
    line.request("GET", path, headers={**signed, "Range": f"bytes={file.tell()}-"})
    answer = _answer(line, 206)
    if answer.length != size - file.tell():
        raise ProtocolError(SERVER, "parcel", f"{file.tell()} and {answer.length} bytes of it, instead of {size}")
    buffer = memoryview(bytearray(SPAN_BYTES))
    while came := answer.readinto(buffer):
        hashed.update(buffer[:came])
        left = buffer[:came]
        while left:
            left = left[file.write(left) :]
        told.at(file.tell())
    if file.tell() < size:
        raise ConnectionError("the line broke")


def _content(payload: Payload) -> str:
    """What tells a payload from another: for a file when it was written, which need not be read for it."""
    part = file_part(payload)
    try:
        status = None if part is None else part.path.stat()
    except OSError:
        status = None
    if part is None or status is None:
        return digest(payload).hex()[:32]
    text = f"{status.st_ino} {status.st_mtime_ns} {status.st_size} {part.offset} {part.nbytes}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def with_identity_of(use: Callable[[ParcelClient], None], wrap: Callable[[Any], Any]) -> None:
    """Give ``use`` the way to parcels of the SuperNode that this process becomes, once it makes its connection.

    What ``wrap`` makes of Flower's client is what the SuperNode has in its place.
    """
    internal: Any = import_module("flwr.supernode.fleet_http_connection")
    connect = internal.FleetHttpClient.from_server_address

    def connect_and_tell(
        address: str, insecure: bool, root_certificates: bytes | str | None, interceptors: Any, **options: Any
    ) -> Any:
        signer = next(each for each in interceptors if isinstance(each, internal.NodeAuthHttpInterceptor))
        share_proofs(signer)
        use(ParcelClient(address, None if insecure else _trust(root_certificates), lambda: _signed(signer)))
        return wrap(connect(address, insecure, root_certificates, interceptors=interceptors, **options))

    vars(internal)["FleetHttpClient"] = SimpleNamespace(from_server_address=connect_and_tell)


def _trust(certificates: bytes | str | None) -> ssl.SSLContext:
    if isinstance(certificates, bytes):
        return ssl.create_default_context(cadata=certificates.decode("ascii"))
    return ssl.create_default_context(cafile=certificates)


def _signed(signer: Any) -> Headers:
    """The headers that Flower's interceptor adds to a request."""
    headers: dict[str, str] = {}
    signer.intercept(SimpleNamespace(request=SimpleNamespace(headers=headers)), lambda context: None)
    return headers
