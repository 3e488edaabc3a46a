"""The hub's door: an ASGI app in which silos ask for questions, answer them, fetch blobs and leave uploads.

Who calls is known by the head of a request, and so is what it may send: nothing is read of anybody else, and no more
than was announced. Every stage has a deadline. It knows nothing of Flower.

| request | with | answer |
|---|---|---|
| ``POST /join`` | ``fedsync-session``: digest of the secret of a session | 204 |
| ``GET /orders?after=N`` | | the first question behind N, held up to ``HOLD_S``; 204; 410: all is over |
| ``POST /answers`` | ``fedsync-head`` | 204, also if nobody waits any more; 409: its upload is not whole |
| ``GET /blobs/SHA256`` | ``range``: an offset | 200 or 206; only blobs of questions that the silo has |
| ``HEAD /uploads/TICKET`` | | ``upload-offset``: how much is there |
| ``PUT /uploads/TICKET`` | ``upload-{offset,length,sha256}`` | 204; 409: it does not go on there |

Each has a secret as bearer token: the join's in ``/join``, else the session's. Anybody else gets 401.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from fedsync.common import foreign
from fedsync.common.checksums import file_digest
from fedsync.common.errors import ProtocolError
from fedsync.model.chunked_arrays import SPAN_BYTES, give_back, map_file, spans
from fedsync.model.transfer import Payload
from fedsync.transport.hub.blobs import Blobs, Upload
from fedsync.transport.hub.sessions import HubSession, Queued, Sessions
from fedsync.transport.questions import (
    ANSWER_TEXT_BYTES,
    BASE,
    BESIDE_BYTES,
    HEAD,
    SESSION,
    Blob,
    FrameHead,
    SiloAnswer,
)

logger = foreign.logger(__name__)

HOLD_S = 25.0
"""How long a request for a question is held; below what proxies and firewalls end quiet lines after."""

BODY_S = 30.0
"""Pause between two pieces of a body after which its sender is taken for gone."""

DRAIN_S = 1.0
"""How long an upload's broken connection may take to end, once its silo asks from where to go on."""

MOST_OPEN = 8
"""Requests of one silo at a time."""

KNOWN = "fedsync.known"
"""Key of a request's scope, where its caller is known."""

_CLOSE = {"connection": "close"}
_Endpoint = Callable[[Request, HubSession], Awaitable[Response]]


class Door:
    """The app.

    Args:
        sessions: who may call, and what is asked.
        blobs: what is fetched and left.
        delivered: called with each answer, and the question that it answers.
        lock: held where sessions and blobs are changed.
    """

    def __init__(
        self, sessions: Sessions, blobs: Blobs, delivered: Callable[[Queued, SiloAnswer], None], lock: RLock
    ) -> None:
        self._sessions, self._blobs, self._delivered, self._lock = sessions, blobs, delivered, lock
        self.over = False
        """Silos are told that there is nothing more to come."""
        self.told = set[str]()
        """Those that were."""
        self.app = Starlette(
            routes=[
                Route(f"{BASE}/join", self._join, methods=["POST"]),
                Route(f"{BASE}/orders", self._known(self._orders), methods=["GET"]),
                Route(f"{BASE}/answers", self._known(self._answers), methods=["POST"]),
                Route(f"{BASE}/blobs/{{digest}}", self._known(self._blob), methods=["GET"]),
                Route(f"{BASE}/uploads/{{ticket}}", self._known(self._offset), methods=["HEAD"]),
                Route(f"{BASE}/uploads/{{ticket}}", self._known(self._upload), methods=["PUT"]),
            ]
        )

    # Who calls.

    async def _join(self, request: Request) -> Response:
        digest = request.headers.get(SESSION, "")
        _length(request, 0)
        if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
            raise HTTPException(400, headers=_CLOSE)
        with self._lock:
            session = self._sessions.begin(_secret(request), digest)
            if session is None:
                raise HTTPException(401, headers=_CLOSE)
            self._sessions.seen(session)
            request.scope[KNOWN] = True
        return Response(status_code=204)

    def _known(self, answer: _Endpoint) -> Callable[[Request], Awaitable[Response]]:
        """Answers whoever has a session's secret, a few requests at a time, and nobody else."""

        async def endpoint(request: Request) -> Response:
            with self._lock:
                session = self._sessions.caller(_secret(request))
                if session is None:
                    raise HTTPException(401, headers=_CLOSE)
                request.scope[KNOWN] = True
                if session.open >= MOST_OPEN:
                    raise HTTPException(429, headers=_CLOSE)
                session.open += 1
                self._sessions.seen(session)
            try:
                return await answer(request, session)
            except ClientDisconnect:
                return Response(status_code=400)
            finally:
                with self._lock:
                    session.open -= 1
                    self._sessions.seen(session)

        return endpoint

    # Questions and answers.

    async def _orders(self, request: Request, session: HubSession) -> Response:
        after = _number(request.query_params.get("after", ""))
        _length(request, 0)
        await request.body()  # what comes after it is the end of the line
        with self._lock:
            self._sessions.counts_on(session, after)
        queued = session.after(after) or await self._held(request, session, after)
        if queued is None and self.over:
            self.told.add(session.silo)
        if queued is None:
            return Response(status_code=410 if self.over else 204)
        payload = queued.question.payload
        blob, beside = (payload, b"") if isinstance(payload, Blob) else (Blob("", 0), _bytes(payload))
        spec, text, most = queued.question.spec.encode(), queued.question.text.encode(), queued.question.most
        head = FrameHead(len(text), queued.number, blob.digest, blob.nbytes, queued.ticket, most, len(spec))
        return Response(spec + text + beside, headers={HEAD: head.dump()}, media_type="application/octet-stream")

    async def _held(self, request: Request, session: HubSession, after: int) -> Queued | None:
        """Wait for a question; None where none comes, the line breaks, or a later request takes this one's place."""
        loop, woken = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(woken.set)

        with self._lock:
            session.wake()
            session.wake = wake
            session.holds += 1
        broken = asyncio.ensure_future(request.receive())
        waits = asyncio.ensure_future(woken.wait())
        try:
            if not self.over and session.after(after) is None:
                await asyncio.wait((waits, broken), timeout=HOLD_S, return_when=asyncio.FIRST_COMPLETED)
            return session.after(after) if session.wake is wake else None
        finally:
            broken.cancel()
            waits.cancel()
            with self._lock:
                session.holds -= 1

    async def _answers(self, request: Request, session: HubSession) -> Response:
        try:
            head = FrameHead.parse(request.headers.get(HEAD, ""), session.silo)
        except ProtocolError as error:
            logger.warning("%s", error)
            raise HTTPException(400, headers=_CLOSE) from None
        queued = session.queued.get(head.number)
        most = BESIDE_BYTES if queued is None else min(queued.question.most, BESIDE_BYTES)
        if head.spec or head.text > (ANSWER_TEXT_BYTES if queued is None else queued.question.most_text):
            raise HTTPException(413, headers=_CLOSE)
        length = _length(request, head.text + most)
        if length < head.text:
            raise HTTPException(400, headers=_CLOSE)
        body = await _body(request, length)
        with self._lock:
            queued = session.queued.get(head.number)
            if queued is None:
                return Response(status_code=204)  # it was answered before, or nobody waits any more
            payload = body[head.text :] if length > head.text else None
            beside: Payload | None = None if payload is None else np.frombuffer(payload, np.uint8)
            if head.ticket:
                beside = self._blobs.take(head.ticket, session.silo) if head.ticket == queued.ticket else None
                if beside is None:
                    raise HTTPException(409)
            try:
                text = body[: head.text].decode()
            except UnicodeDecodeError:
                raise HTTPException(400) from None
            del session.queued[head.number]
            self._delivered(queued, SiloAnswer(queued.name, text, beside, relay=bool(head.relay)))
        return Response(status_code=204)

    # Large bytes.

    async def _blob(self, request: Request, session: HubSession) -> Response:
        digest = str(request.path_params["digest"])
        found = self._blobs.find(digest)
        asked = any(
            isinstance(each.question.payload, Blob) and each.question.payload.digest == digest
            for each in list(session.queued.values())
        )
        if found is None or not asked:
            raise HTTPException(404)
        path, size = found
        begin, span = 0, request.headers.get("range", "")
        if span:
            begin = _number(span.removeprefix("bytes=").removesuffix("-"))
            if not span.startswith("bytes=") or not span.endswith("-") or begin >= size:
                raise HTTPException(416)
        return StreamingResponse(
            _spans(path, begin, size, session),
            status_code=206 if span else 200,
            headers={"content-length": str(size - begin)},
            media_type="application/octet-stream",
        )

    def _expected(self, request: Request, session: HubSession) -> Upload:
        upload = self._blobs.upload(str(request.path_params["ticket"]), session.silo)
        if upload is None:
            raise HTTPException(404, headers=_CLOSE)
        return upload

    async def _offset(self, request: Request, session: HubSession) -> Response:
        """How much of an upload is there; a connection that still sends counts no more.

        One that broke is given a moment, for what has come of it to be written.
        """
        upload = self._expected(request, session)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(upload.idle.wait(), DRAIN_S)
        upload.writer += 1
        async with upload.lock:
            whole = {"upload-sha256": upload.digest} if upload.whole else {}
            return Response(headers={"upload-offset": str(upload.there), **whole})

    async def _upload(self, request: Request, session: HubSession) -> Response:
        upload = self._expected(request, session)
        there, total = upload.there, _number(request.headers.get("upload-length", ""))
        if upload.whole or request.headers.get("upload-offset") != str(there):
            raise HTTPException(409, headers={"upload-offset": str(there), **_CLOSE})
        if total > upload.most or _length(request, upload.most - there) != total - there:
            raise HTTPException(413, headers=_CLOSE)
        upload.writer += 1
        mine, pieces, waiting = upload.writer, list[bytes](), 0
        upload.idle.clear()
        try:
            async for piece in _pieces(request, total - there):
                pieces.append(piece)
                waiting += len(piece)
                if waiting >= SPAN_BYTES:
                    await _write(upload, mine, pieces)
                    pieces, waiting = [], 0
        finally:  # what came is kept, and the silo goes on from there
            try:
                await _write(upload, mine, pieces)
            finally:
                if upload.writer == mine:
                    upload.idle.set()
        async with upload.lock:
            if upload.writer != mine:
                raise HTTPException(409, headers=_CLOSE)
            if upload.there == total and not await _is_whole(upload, request.headers.get("upload-sha256", "")):
                raise HTTPException(422)
        return Response(status_code=204)


def _secret(request: Request) -> str:
    scheme, _, secret = request.headers.get("authorization", "").partition(" ")
    return secret if scheme == "Bearer" and len(secret) <= 128 else ""


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 15):
        raise HTTPException(400, headers=_CLOSE)
    return int(text)


def _length(request: Request, most: int) -> int:
    """How much will be sent, which has to be said, before any of it is read."""
    text = request.headers.get("content-length", "0" if most == 0 else "")
    if not text or "transfer-encoding" in request.headers:
        raise HTTPException(411, headers=_CLOSE)
    if _number(text) > most:
        raise HTTPException(413, headers=_CLOSE)
    return int(text)


async def _pieces(request: Request, length: int) -> AsyncIterator[bytes]:
    """A body as it comes, at most so many bytes; its sender is gone where a piece takes too long."""
    stream, left = request.stream(), length
    while True:
        try:
            piece = await asyncio.wait_for(anext(stream), BODY_S)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise HTTPException(408, headers=_CLOSE) from None
        left -= len(piece)
        if left < 0:
            raise HTTPException(413, headers=_CLOSE)
        if piece:
            yield piece


async def _body(request: Request, length: int) -> bytes:
    body = b"".join([piece async for piece in _pieces(request, length)])
    if len(body) != length:
        raise HTTPException(400, headers=_CLOSE)
    return body


async def _write(upload: Upload, mine: int, pieces: list[bytes]) -> None:
    """Append pieces, unless another connection has taken this one's place."""
    async with upload.lock:
        if upload.writer != mine:
            raise HTTPException(409, headers=_CLOSE)
        if pieces:
            try:
                await asyncio.to_thread(_append, upload.path, pieces)
                if upload.gone:
                    upload.path.unlink(missing_ok=True)
            except OSError as error:
                logger.error("%s cannot be written: %s", upload.path, error.strerror)
                raise HTTPException(507, headers=_CLOSE) from None


def _append(path: Path, pieces: list[bytes]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "ab") as file:
        file.writelines(pieces)


async def _is_whole(upload: Upload, digest: str) -> bool:
    """Whether what is there has the digest that was announced; if not, it goes."""
    found = await asyncio.to_thread(file_digest, upload.path)
    if found != digest:
        upload.path.unlink(missing_ok=True)
        return False
    upload.whole, upload.digest = True, digest
    return True


async def _spans(path: Path, begin: int, size: int, session: HubSession) -> AsyncIterator[memoryview]:
    """A file from the system's cache to the line; what went out counts as nobody's memory.

    It is one of the silo's open requests until its end.
    """
    session.open += 1
    try:
        whole = map_file(path)
        for start, stop in spans(size - begin, 4):
            yield whole[begin + start : begin + stop].data
        give_back(whole)
    finally:
        session.open -= 1


def _bytes(payload: Any) -> bytes:
    return b"" if payload is None else bytes(memoryview(payload).cast("B"))
