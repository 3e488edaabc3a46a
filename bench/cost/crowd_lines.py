"""Silos' connections to a hub, thousands in one process: like `fedsync.transport.hub_line`, but cheap."""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from dataclasses import dataclass

import numpy as np

from fedsync.model.transfer import Payload
from fedsync.transport.join import Join, digest_of
from fedsync.transport.port import BASE, BESIDE_BYTES, FrameHead


@dataclass(frozen=True, slots=True)
class Asked:
    """A question: what its head says of it, the run's specification, its text, and the bytes beside it."""

    head: FrameHead
    spec: str
    text: str
    payload: Payload | None


class CrowdLine:
    """A connection on which one request comes after the other.

    Args:
        join: of the silo.
        secret: of its session.
        trust: of all lines of this process.
    """

    def __init__(self, join: Join, secret: str, trust: ssl.SSLContext) -> None:
        self._join, self._secret, self._trust = join, secret, trust
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def join(self) -> bool:
        """Begin the session; False where another join has taken this one's place."""
        head = f"fedsync-session: {digest_of(self._secret)}\r\n"
        return (await self._ask("POST", "/join", head, secret=self._join.secret))[0] == 204

    async def asked(self, after: int) -> Asked | None:
        """The first question behind this number; None where none came for a while.

        Raises:
            EOFError: all is over.
        """
        status, fields, body = await self._ask("GET", f"/orders?after={after}")
        if status != 200:
            return None
        head = FrameHead.parse(fields["fedsync-head"])
        text = head.spec + head.text
        beside = (await self._ask("GET", f"/blobs/{head.blob}"))[2] if head.blob else body[text:]
        payload = np.frombuffer(beside, np.uint8) if beside else None
        return Asked(head, body[: head.spec].decode(), body[head.spec : text].decode(), payload)

    async def answer(self, asked: FrameHead, text: str, payload: Payload | None, *, relay: bool = False) -> None:
        """Answer a question; nobody may wait for it any more."""
        encoded, data, ticket = text.encode(), b"" if payload is None else payload.tobytes(), ""
        if len(data) > BESIDE_BYTES:
            ticket, digest = asked.ticket, hashlib.sha256(data).hexdigest()
            told = f"upload-offset: 0\r\nupload-length: {len(data)}\r\nupload-sha256: {digest}\r\n"
            await self._ask("PUT", f"/uploads/{ticket}", told, data)
            data = b""
        head = FrameHead(len(encoded), asked.number, ticket=ticket, relay=int(relay))
        await self._ask("POST", "/answers", f"fedsync-head: {head.dump()}\r\n", encoded + data)

    async def _ask(
        self, method: str, path: str, more: str = "", body: bytes = b"", secret: str = ""
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, fields and body of an answer."""
        host, _, port = self._join.addresses[0].removeprefix("https://").removesuffix(BASE).rpartition(":")
        if self._streams is None:
            self._streams = await asyncio.open_connection(host, int(port), ssl=self._trust)
        reader, writer = self._streams
        head = f"{method} {BASE}{path} HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {secret or self._secret}\r\n"
        writer.write(f"{head}{more}content-length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        found = await reader.readexactly(int(fields.get("content-length", "0")))
        status = int(first.split()[1])
        if fields.get("connection") == "close":
            writer.close()
            self._streams = None
        if status == 410:
            raise EOFError(path)
        if status not in (200, 204, 401, 404):
            raise SystemExit(f"{method} {path}: {status}")
        return status, fields, found


def trusting(authority: str) -> ssl.SSLContext:
    """Trusts one authority, PEM."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=authority)
    return context
