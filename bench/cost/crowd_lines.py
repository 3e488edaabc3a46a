"""Connections of `bench/cost/crowd.py`, thousands of which one process has."""

from __future__ import annotations

import asyncio
import ssl


class HttpLine:
    """A connection to the server, on which one request comes after the other."""

    def __init__(self, address: tuple[str, int], trust: ssl.SSLContext | None) -> None:
        self._address, self._trust = address, trust
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, headers: str, body: bytes) -> bytes:
        """The body of the answer; `OSError` where there is none, `PermissionError` where it is refused."""
        return await self._ask(f"POST {path}", f"{headers}content-length: {len(body)}\r\n", body)

    async def get(self, path: str, headers: str) -> bytes:
        """A file from its begin; `FileNotFoundError` where there is none any more, other errors as of `post`."""
        return await self._ask(f"GET {path}", f"{headers}range: bytes=0-\r\n", b"")

    async def _ask(self, what: str, headers: str, body: bytes) -> bytes:
        try:
            if self._streams is None:
                name = "localhost" if self._trust is not None else None
                self._streams = await asyncio.open_connection(*self._address, ssl=self._trust, server_hostname=name)
            reader, writer = self._streams
            head = f"{what} HTTP/1.1\r\nhost: localhost\r\n{headers}\r\n"
            writer.write(head.encode() + body)
            await writer.drain()
            first, *fields = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            found = {name.lower(): value.strip() for name, _, value in (field.partition(":") for field in fields)}
            answer = await reader.readexactly(int(found.get("content-length", "0")))
        except (asyncio.IncompleteReadError, ConnectionError, ssl.SSLError) as error:
            self.close()
            raise ConnectionError(str(error)) from error
        if found.get("connection") == "close":
            self.close()
        status = int(first.split()[1])
        if status == 503:
            raise ConnectionError(answer.decode())
        if status == 404:
            raise FileNotFoundError(what)
        if status not in (200, 206):
            raise PermissionError(f"{what}: {status} {answer[:200]!r}")
        return answer

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None
