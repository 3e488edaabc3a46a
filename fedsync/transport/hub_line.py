"""HTTPS client of a silo for the server's hub: it trusts one authority, and uses the proxy of the environment."""

from __future__ import annotations

import os
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from fedsync.common.backoff import Backoff
from fedsync.common.errors import SERVER, ProtocolError, RunError
from fedsync.common.files import file_digest
from fedsync.model.chunked_arrays import digest, pieces
from fedsync.model.transfer import MAX_SEALED_BYTES, Payload
from fedsync.transport.join import Join, digest_of
from fedsync.transport.port import BESIDE_BYTES, HEAD, SESSION, Blob, FrameHead

HELD_S = 40.0  # timeout of a long-poll request; longer than the hub holds it

MOST_BREAKS = 20  # consecutive connection failures without any progress after which a transfer fails

_MOST_SAID, _MOST_DIGITS = 65_536, 15
_PAUSES = Backoff(0.1, 5.0)
_TIMES = httpx.Timeout(10.0, read=HELD_S, write=HELD_S)
_BROKEN = (httpx.TransportError, httpx.StreamError)


class JoinRefused(RunError):
    """Error: the hub knows neither the join nor the session; the silo waits for another join."""


class Over(RunError):
    """Error: the hub has closed the run; no more questions will come."""


@dataclass(frozen=True, slots=True)
class ReceivedQuestion:
    """Question received from the server: ``payload`` is uint8 or a blob to fetch, ``spec`` the run's specification.
    ``ticket`` admits the upload of a large answer, whose payload has at most ``most`` bytes.
    """

    number: int
    text: str
    payload: Payload | Blob | None
    ticket: str
    most: int
    spec: str = ""


class HubLine:
    """Thread-safe client of one session at the hub, whose ``secret`` only this silo knows. All requests raise
    `JoinRefused` if the session has ended, `Over` if the run is over, and httpx.TransportError if the connection failed
    (for transfers: too often).
    """

    def __init__(self, join: Join, secret: str) -> None:
        self._join, self._secret = join, secret
        verify: ssl.SSLContext | bool = False
        if join.authority:
            verify = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            verify.load_verify_locations(cadata=join.authority)
        headers = {"accept-encoding": "identity"}  # a small compressed body may expand to a large one
        self._http = httpx.Client(base_url=join.addresses[0], verify=verify, timeout=_TIMES, headers=headers)

    def close(self) -> None:
        self._http.close()

    def join(self) -> None:
        """Begin the session, or confirm that it has begun."""
        headers = {"authorization": f"Bearer {self._join.secret}", SESSION: digest_of(self._secret)}
        self._checked(self._said("POST", "/join", headers))

    def asked(self, after: int) -> ReceivedQuestion | None:
        """Return the first question after number ``after``; waits for it, and returns None after the hub's timeout.
        `ProtocolError` if the response is invalid.
        """
        with self._http.stream("GET", "/orders", params={"after": after}, headers=self._known()) as reply:
            self._checked(reply)
            if reply.status_code == 204:
                return None
            head = FrameHead.parse(reply.headers.get(HEAD, ""))
            body = _bounded(reply, head.spec + head.text + BESIDE_BYTES)
        begin, end = head.spec, head.spec + head.text
        if len(body) < end or head.nbytes > MAX_SEALED_BYTES or head.number <= after:
            raise ProtocolError(SERVER, "question", "its parts do not fit together")
        try:
            spec, text = body[:begin].decode(), body[begin:end].decode()
        except UnicodeDecodeError:
            raise ProtocolError(SERVER, "question", "it is no text") from None
        payload: Payload | Blob | None = None
        if head.blob:
            payload = Blob(head.blob, head.nbytes)
        elif len(body) > end or head.empty:
            payload = np.frombuffer(body, np.uint8, offset=end)
        return ReceivedQuestion(head.number, text, payload, head.ticket, head.most, spec)

    def answer(
        self, asked: ReceivedQuestion, text: str, payload: Payload | None = None, *, relay: bool = False
    ) -> None:
        """Answer a question, after the upload of a large payload; may be repeated. `ProtocolError` if too large."""
        beside, ticket = b"", ""
        if payload is not None and payload.nbytes > asked.most:
            raise ProtocolError(SERVER, "question", f"an answer of {payload.nbytes} bytes, at most {asked.most}")
        if payload is not None and payload.nbytes > BESIDE_BYTES:
            if not self.upload(asked.ticket, payload):
                return  # the server no longer expects the answer
            ticket = asked.ticket
        elif payload is not None:
            beside = payload.tobytes()
        encoded = text.encode()
        empty = int(payload is not None and not payload.nbytes)
        head = FrameHead(len(encoded), asked.number, ticket=ticket, relay=int(relay), empty=empty)
        content = encoded + beside
        headers = {**self._known(), HEAD: head.dump()}
        self._checked(self._said("POST", "/answers", headers, content))

    def fetch(self, blob: Blob, path: Path) -> None:
        """Fetch a blob to the file ``path``, which is written only when complete; resumes an earlier partial download.
        `ProtocolError` if the data do not match the digest.
        """
        part, breaks = path.with_name(f"{path.name}.part"), 0
        while True:
            there = part.stat().st_size if part.exists() else 0
            try:
                if there < blob.nbytes:
                    self._fetch_on(blob, part, there)
            except _BROKEN:
                breaks = 1 if part.exists() and part.stat().st_size > there else breaks + 1
                if breaks > MOST_BREAKS:
                    raise
                time.sleep(_PAUSES.pause_s(breaks - 1))
                continue
            found = file_digest(part)
            if found != blob.digest:
                part.unlink()
                raise ProtocolError(SERVER, "blob", f"it has the digest {found[:16]}, not {blob.digest[:16]}")
            part.replace(path)
            return

    def _fetch_on(self, blob: Blob, part: Path, there: int) -> None:
        headers = {**self._known(), **({"range": f"bytes={there}-"} if there else {})}
        with self._http.stream("GET", f"/blobs/{blob.digest}", headers=headers) as reply:
            self._checked(reply)
            if reply.status_code != (206 if there else 200):
                raise ProtocolError(SERVER, "blob", f"status {reply.status_code} for the bytes from {there} on")
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with os.fdopen(descriptor, "ab") as file:
                for piece in reply.iter_raw():
                    there += len(piece)
                    if there > blob.nbytes:
                        raise ProtocolError(SERVER, "blob", f"more than its {blob.nbytes} bytes")
                    file.write(piece)

    def upload(self, ticket: str, payload: Payload) -> bool:
        """Upload a large answer from the hub's offset on; False if the server no longer expects the answer."""
        data = payload.view(np.uint8)
        content, breaks, before = digest(data).hex(), 0, -1
        while True:
            try:
                reply = self._said("HEAD", f"/uploads/{ticket}", self._known())
                if reply.status_code == 404:
                    return False
                self._checked(reply)
                if reply.headers.get("upload-sha256") == content:
                    return True
                text = reply.headers.get("upload-offset", "")
                if not text.isdecimal() or len(text) > _MOST_DIGITS or int(text) > len(data):
                    raise ProtocolError(SERVER, "upload-offset", f"{text!r:.40}")
                there = int(text)
                breaks, before = (0 if there > before else breaks), max(there, before)
                headers = {
                    **self._known(), "content-length": str(len(data) - there), "upload-offset": str(there),
                    "upload-length": str(len(data)), "upload-sha256": content,
                }  # fmt: skip
                reply = self._said("PUT", f"/uploads/{ticket}", headers, map(bytes, pieces(data[there:])))
                if reply.status_code in (404, 409, 422):
                    raise httpx.WriteError("another connection has taken this one's place, or nobody expects it")
                self._checked(reply)
                return True
            except _BROKEN:
                breaks += 1
                if breaks > MOST_BREAKS:
                    raise
                time.sleep(_PAUSES.pause_s(breaks - 1))

    def _said(self, method: str, path: str, headers: dict[str, str], content: Any = b"") -> httpx.Response:
        with self._http.stream(method, path, headers=headers, content=content) as reply:
            _bounded(reply, _MOST_SAID)
            return reply

    def _known(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self._secret}"}

    @staticmethod
    def _checked(reply: httpx.Response) -> None:
        """Check a response's status; a temporary failure becomes a httpx.TransportError, and may be retried."""
        status = reply.status_code
        if status == 401:
            raise JoinRefused("the hub knows neither this join nor its session; another join begins one")
        if status == 410:
            raise Over("the server has said that the run is over")
        if status in (408, 429, 500, 502, 503, 504, 507):
            raise httpx.ReadError(f"the hub answers {status}")
        if status not in (200, 204, 206):
            raise ProtocolError(SERVER, "status", f"{status}")


def _bounded(reply: httpx.Response, most: int) -> bytes:
    pieces, there = list[bytes](), 0
    for piece in reply.iter_raw():
        there += len(piece)
        if there > most:
            raise ProtocolError(SERVER, "question", f"more than {most} bytes")
        pieces.append(piece)
    return b"".join(pieces)
