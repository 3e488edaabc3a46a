"""HTTP interface of the hub: an ASGI app where silos get questions (requests), send answers, and transfer files.

The head of a request identifies the caller, and so determines its limits. The app reads no body of unknown callers, and
never more than announced. Every stage has a timeout. The app is independent of Flower.

| request | parameters | response |
|---|---|---|
| ``POST /join`` | ``fedsync-session``: digest of the secret of a session | 204 |
| ``GET /orders?after=N`` | | the first question after N, held up to ``HOLD_S``; 204; 410: the run is over |
| ``POST /answers`` | ``fedsync-head`` | 204, also if the answer is no longer expected; 409: its upload is incomplete |
| ``GET /blobs/SHA256`` | ``range``: an offset | 200 or 206; only blobs of the silo's own questions |
| ``HEAD /uploads/TICKET`` | | ``upload-offset``: bytes received |
| ``PUT /uploads/TICKET`` | ``upload-{offset,length,sha256}`` | 204; 409: wrong offset |

Each request has a secret as bearer token: the join's in ``/join``, else the session's. Any other caller gets 401.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from math import inf
from pathlib import Path
from threading import RLock

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from fedsync.common import foreign
from fedsync.common.errors import ProtocolError
from fedsync.common.files import file_digest
from fedsync.model.chunked_arrays import SPAN_BYTES, give_back, map_file, spans
from fedsync.model.transfer import Payload
from fedsync.transport.hub.blobs import Blobs, Upload
from fedsync.transport.hub.sessions import HubSession, Queued, Sessions
from fedsync.transport.port import ANSWER_TEXT_BYTES, BASE, BESIDE_BYTES, HEAD, SESSION, Blob, FrameHead, SiloAnswer

logger = foreign.logger(__name__)

HOLD_S = 25.0  # time that a request for a question is held; below the idle timeouts of proxies and firewalls

BODY_S = 30.0  # timeout between two pieces of a body

DRAIN_S = 1.0  # time that a broken upload connection gets to end when its silo asks for the offset

MOST_OPEN = 8  # concurrent requests of one silo

KNOWN = "fedsync.known"  # key in a request's scope that marks an authenticated caller

_CLOSE = {"connection": "close"}
_Endpoint = Callable[[Request, HubSession], Awaitable[Response]]


class Door:
    """ASGI app of the hub; calls ``delivered`` for each answer, and holds ``lock`` to change sessions and blobs."""

    def __init__(
        self, sessions: Sessions, blobs: Blobs, delivered: Callable[[Queued, SiloAnswer], None], lock: RLock
    ) -> None:
        self._sessions, self._blobs, self._delivered, self._lock = sessions, blobs, delivered, lock
        self.over = False  # whether silos are told that the run is over
        self.told = set[str]()  # silos that know that the run is over
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

    # Authentication.

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
        await request.body()  # so that the next message signals the end of the connection
        queued = session.after(after) or await self._held(request, session, after)
        if queued is None and self.over:
            self.told.add(session.silo)
        if queued is None:
            return Response(status_code=410 if self.over else 204)
        payload = queued.question.payload
        blob = payload if isinstance(payload, Blob) else Blob("", 0)
        beside = b"" if payload is None or isinstance(payload, Blob) else payload.tobytes()
        spec, text, most = queued.question.spec.encode(), queued.question.text.encode(), queued.question.most
        empty = int(payload is not None and not payload.nbytes)
        head = FrameHead(len(text), queued.number, blob.digest, blob.nbytes, queued.ticket, most, len(spec), 0, empty)
        return Response(spec + text + beside, headers={HEAD: head.dump()}, media_type="application/octet-stream")

    async def _held(self, request: Request, session: HubSession, after: int) -> Queued | None:
        """Wait for a question; None after a timeout, a disconnect, or if a newer request replaces this request."""
        loop, woken = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has ended
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
            raise self._too_large(session, head.number)
        length = _length(request)
        if length > head.text + most:
            raise self._too_large(session, head.number)
        if length < head.text:
            raise HTTPException(400, headers=_CLOSE)
        body = b"".join([piece async for piece in _pieces(request, length)])
        if len(body) != length:
            raise HTTPException(400, headers=_CLOSE)
        with self._lock:
            queued = session.queued.get(head.number)
            if queued is None:
                return Response(status_code=204)  # answered already, or no longer expected
            payload = body[head.text :] if length > head.text or head.empty else None
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

    def _too_large(self, session: HubSession, number: int = 0, ticket: str = "") -> HTTPException:
        """Refuse an answer that is larger than its question permits, and end the question: nobody waits for another."""
        with self._lock:
            for queued in list(session.queued.values()):
                if queued.number == number or queued.ticket == ticket != "":
                    del session.queued[queued.number]
                    problem = "its answer is larger than the question permits"
                    self._delivered(queued, SiloAnswer(queued.name, problem=problem, check="length"))
        return HTTPException(413, headers=_CLOSE)

    # Blobs and uploads.

    async def _blob(self, request: Request, session: HubSession) -> Response:
        digest = str(request.path_params["digest"])
        found = self._blobs.find(digest)
        payloads = [each.question.payload for each in list(session.queued.values())]
        if found is None or not any(isinstance(each, Blob) and each.digest == digest for each in payloads):
            raise HTTPException(404)
        path, size = found
        begin, span = 0, request.headers.get("range", "")
        if span:
            begin = _number(span.removeprefix("bytes=").removesuffix("-"))
            if not span.startswith("bytes=") or not span.endswith("-") or begin >= size:
                raise HTTPException(416)
        status, headers = 206 if span else 200, {"content-length": str(size - begin)}
        return StreamingResponse(_spans(path, begin, size, session), status, headers, "application/octet-stream")

    def _expected(self, request: Request, session: HubSession) -> Upload:
        upload = self._blobs.upload(str(request.path_params["ticket"]), session.silo)
        if upload is None:
            raise HTTPException(404, headers=_CLOSE)
        return upload

    async def _offset(self, request: Request, session: HubSession) -> Response:
        """Report the received bytes of an upload, and invalidate a connection that still sends. A broken connection
        gets a moment, so that its received bytes are written.
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
        if total > upload.most:
            raise self._too_large(session, ticket=upload.path.name)
        if _length(request, upload.most - there) != total - there:
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
        finally:  # received bytes are kept, and the silo resumes from there
            try:
                await _write(upload, mine, pieces)
            finally:
                if upload.writer == mine:
                    upload.idle.set()
        async with upload.lock:
            if upload.writer != mine:
                raise HTTPException(409, headers=_CLOSE)
            if upload.there == total:
                upload.digest = await asyncio.to_thread(file_digest, upload.path)
                upload.whole = upload.digest == request.headers.get("upload-sha256")
                if not upload.whole:  # the silo begins again
                    upload.path.unlink(missing_ok=True)
                    raise HTTPException(422)
        return Response(status_code=204)


def _secret(request: Request) -> str:
    scheme, _, secret = request.headers.get("authorization", "").partition(" ")
    return secret if scheme == "Bearer" and len(secret) <= 128 else ""


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 15):
        raise HTTPException(400, headers=_CLOSE)
    return int(text)


def _length(request: Request, most: float = inf) -> int:
    """Return the announced length of the body, which is mandatory, before the body is read."""
    text = request.headers.get("content-length", "0" if most == 0 else "")
    if not text or "transfer-encoding" in request.headers:
        raise HTTPException(411, headers=_CLOSE)
    if _number(text) > most:
        raise HTTPException(413, headers=_CLOSE)
    return int(text)


async def _pieces(request: Request, length: int) -> AsyncIterator[bytes]:
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


async def _write(upload: Upload, mine: int, pieces: list[bytes]) -> None:
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


async def _spans(path: Path, begin: int, size: int, session: HubSession) -> AsyncIterator[memoryview]:
    """Yield a file from the system's cache, and release its pages, so that it does not occupy memory. The stream counts
    as one of the silo's open requests until its end.
    """
    session.open += 1
    try:
        whole = map_file(path)
        for start, stop in spans(size - begin, 4):
            yield whole[begin + start : begin + stop].data
            give_back(whole)
    finally:
        session.open -= 1
