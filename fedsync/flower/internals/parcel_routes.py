"""The gate's own routes: silos fetch parcels and leave uploads, file to socket and socket to file.

| request, below ``/v1/fedsync/SESSION/`` | answer |
|---|---|
| ``GET parcels/DIGEST``, with ``Range: bytes=N-`` | 200 or 206 and the file from there; 404, 416 |
| ``GET uploads/TICKET/CONTENT`` | 200 and how many bytes are there; 404 where nobody expects it from this node |
| ``PUT`` the same, with ``Content-Range: bytes FIRST-LAST/TOTAL`` | as ``GET``; 409 where it does not go on from what |
| | is there, 413 where it is too large, 503 above the quota, 507 on a full disk |

Who asks was proved before; see `fedsync.flower.internals.access_middleware`. What may be asked for is what the
ServerApp has written into the folder (`fedsync.flower.parcels`). Nothing is held but a span: a body is written as it
comes, and what came stays when the line breaks. Of two connections for one upload the later one counts, and of two
uploads under one ticket; the file of the other goes, and nobody holds it open. What a request announces counts for the
quota from its head on. Files are never shortened, nor is what is there written again: the ServerApp may have mapped it.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anyio.to_thread import run_sync

from fedsync.core import foreign
from fedsync.core.spans import SPAN_BYTES
from fedsync.flower.parcels import node_folder, still_written, upload_path

logger = foreign.logger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

PREFIX = "/v1/fedsync/"

MAX_PART_BYTES = 2**25
"""Bytes of an upload that one request brings."""

HELD_BYTES = 4 * SPAN_BYTES
"""What a request takes of the server's memory, however long it is."""

_PARCEL = re.compile(rf"{PREFIX}([0-9a-f]{{16}})/parcels/([0-9a-f]{{64}})")
_UPLOAD = re.compile(rf"{PREFIX}([0-9a-f]{{16}})/uploads/([0-9a-f]{{32}})/([0-9a-f]{{32}})")
_FROM = re.compile(rb"bytes=([0-9]{1,15})-")
_PART = re.compile(rb"bytes ([0-9]{1,15})-([0-9]{1,15})/([0-9]{1,15})")


class NoParcel(Exception):
    """A request is not served: status and text of the answer."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(status, text)
        self.status = status
        self.text = text


@dataclass(frozen=True, slots=True, eq=False)
class _Writer:
    """A request that brings a part of an upload, which ``end`` bytes of are there afterwards."""

    end: int


class ParcelRoutes:
    """Serves the parcels of a server.

    Args:
        root: the folder of parcels.
        quota: bytes that may wait of one node's uploads.
    """

    def __init__(self, root: Path, quota: int) -> None:
        self._root = root
        self._quota = quota
        self._writers: dict[Path, _Writer] = {}

    async def serve(self, node: int, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request of a node, whose length is known to be at most `MAX_PART_BYTES`.

        Raises:
            NoParcel: there is nothing to be had, or taken.
        """
        method, path, headers = scope["method"], str(scope["path"]), dict(scope["headers"])
        parcel, upload = _PARCEL.fullmatch(path), _UPLOAD.fullmatch(path)
        if parcel is not None and method == "GET":
            await self._download(self._root / parcel[1] / parcel[2], headers, receive, send)
        elif upload is not None and method in ("GET", "PUT"):
            folder = node_folder(self._root / upload[1], node)
            most = _most(folder / upload[2])
            path_of = upload_path(folder, upload[2], upload[3])
            if method == "PUT":
                await self._take(path_of, most, headers, receive)
            await reply(send, 200, str(_size(path_of)).encode())
        else:
            raise NoParcel(404, "no such parcel")

    async def _download(self, path: Path, headers: dict[bytes, bytes], receive: Receive, send: Send) -> None:
        asked = headers.get(b"range")
        found = _FROM.fullmatch(asked) if asked is not None else None
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            raise NoParcel(404, "no such parcel") from None
        left: asyncio.Task[None] | None = None
        try:
            size = os.fstat(descriptor).st_size
            at = int(found[1]) if found is not None else 0
            if (asked is not None and found is None) or at > size:
                raise NoParcel(416, "no such range")
            length = (b"content-length", str(size - at).encode())
            await send({"type": "http.response.start", "status": 206 if found else 200, "headers": [length]})
            left = asyncio.create_task(gone(receive))
            while at < size and not left.done():
                data = await run_sync(os.pread, descriptor, SPAN_BYTES, at)
                at += len(data)
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            if left is not None:
                left.cancel()
            os.close(descriptor)

    async def _take(self, path: Path, most: int, headers: dict[bytes, bytes], receive: Receive) -> None:
        """Write a part of an upload behind what is there."""
        part = _PART.fullmatch(headers.get(b"content-range", b""))
        first, last, total = map(int, part.groups()) if part is not None else (0, -2, 0)
        length = int(headers.get(b"content-length", b"0"))
        if part is None or last - first + 1 != length or last >= total:
            raise NoParcel(400, "say which part of how much it is")
        if total > most:
            logger.error("%s: an upload of %d bytes is refused, at most %d are expected", path.parent.name, total, most)
            raise NoParcel(413, "it is larger than what is expected")
        if first != _size(path):
            raise NoParcel(409, str(_size(path)))
        for other in {*path.parent.glob(f"{path.stem}.*"), *self._writers}:
            if other != path and other.with_suffix("") == path.with_suffix(""):
                self._writers.pop(other, None)
                other.unlink(missing_ok=True)
        if self._waiting(path) + last + 1 > self._quota:
            logger.warning("%s has too many bytes that wait; see gate in server.yaml", path.parent.name)
            raise NoParcel(503, "too much of yours waits; come again")
        with self._writing(path, _Writer(last + 1)) as writes:
            try:
                await _write(path, first, length, receive, writes)
            except OSError as error:
                path.unlink(missing_ok=True)
                logger.error("%s: an upload cannot be written: %s", path.parent.name, error)
                raise NoParcel(507, "the server's disk takes no more") from error

    def _waiting(self, path: Path) -> int:
        """Bytes of a node's other uploads that the ServerApp has not taken, with those that are about to come."""
        there = {each: _size(each) for each in path.parent.iterdir() if not each.name.startswith("kept-")}
        for each, writer in self._writers.items():
            if each.parent == path.parent:
                there[each] = max(there.get(each, 0), writer.end)
        there.pop(path, None)
        return sum(there.values())

    @contextmanager
    def _writing(self, path: Path, me: _Writer) -> Iterator[Callable[[], bool]]:
        """Be the one who writes a file; what this gives says whether one still is."""
        self._writers[path] = me
        try:
            yield lambda: self._writers.get(path) is me
        finally:
            if self._writers.get(path) is me:
                del self._writers[path]


async def _write(path: Path, at: int, length: int, receive: Receive, writes: Callable[[], bool]) -> None:
    """Write a body as it comes; what came before the line broke stays.

    Raises:
        OSError: the disk takes no more. The rest of the body is read, so that whoever sends it hears that.
    """
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600))
    end, waiting, more, failure = at + length, bytearray(), True, None
    while more:
        message = await receive()
        more = message["type"] == "http.request" and message.get("more_body", False)
        waiting += message.get("body", b"")
        if len(waiting) < SPAN_BYTES and more:
            continue
        if not writes():
            raise NoParcel(409, "another connection goes on with it")
        if at + len(waiting) > end:
            raise NoParcel(400, "it is longer than it said")
        if failure is None:
            try:
                await run_sync(_write_at, path, waiting, at)
            except OSError as error:
                failure = error
        at, waiting = at + len(waiting), bytearray()
    if failure is not None:
        raise failure


def _write_at(path: Path, data: bytearray, at: int) -> None:
    """Write a span. The file is open no longer than that: one that was removed would stay on the disk as long."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise NoParcel(409, "it is not expected any more") from None
    try:
        with still_written(path, descriptor) as mine:
            if not mine:
                raise NoParcel(409, "it is not expected any more")
            left = memoryview(data)
            while left:
                written = os.pwrite(descriptor, left, at)
                left, at = left[written:], at + written
    finally:
        os.close(descriptor)


async def gone(receive: Receive) -> None:
    """Return when the peer is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def reply(send: Send, status: int, text: bytes) -> None:
    """Send a whole answer."""
    length = (b"content-length", str(len(text)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [length]})
    await send({"type": "http.response.body", "body": text})


def _most(ticket: Path) -> int:
    try:
        return int(ticket.read_text())
    except (OSError, ValueError):
        raise NoParcel(404, "nobody expects this upload of you") from None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
