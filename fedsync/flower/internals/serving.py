"""Serves a SuperLink's interfaces: takes connections in, and gives none of their stages more than its time and bytes.

| stage | over when | at most |
|---|---|---|
| handshake | TLS is agreed | ``patience_s`` |
| head | the head of a request is there; again after each answer | ``patience_s``, `MOST_HEAD` bytes |
| request | it is answered | see `fedsync.flower.internals.access_middleware` |
| answer | the peer has taken it | `GRACE_S` and its bytes at `SLOWEST` |
| end | TLS is closed by both | `END_S` |

Uvicorn does the talking. Its own server hands a connection over after the TLS handshake, and before that nobody
counts it; so connections are accepted here. A connection has one request at a time, and the next, which may come as
soon as the peer has read the end of an answer, before that end is noted here. Whoever sends more is cut off.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import sys
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from fedsync.common.allocation import settle
from fedsync.common.processes import raise_file_limit
from fedsync.config.gate import GateConfig
from fedsync.core import foreign
from fedsync.flower.internals.lines import Line, Lines, most_lines

logger = foreign.logger(__name__)

MOST_HEAD = 2**15
"""Bytes of a request's head; Flower's have less than 2 KiB."""

SLOWEST = 2**13
"""Bytes per second that a request or an answer must make on average."""

GRACE_S = 30.0
"""Seconds that a request or an answer has beside those for its bytes."""

END_S = GRACE_S

LINE = "fedsync.line"
"""In the extensions of a request's scope: its `Line`."""

_AT_ONCE = 16
_EACH_ANSWER = "[Fleet.PushMessages] Push replies"
_NO_FILES_S = 0.1


def time_for(size: int) -> float:
    """Seconds that the transfer of so many bytes may take."""
    return GRACE_S + size / SLOWEST


class LimitedProtocol(HttpToolsProtocol):
    """HTTP on one connection, within limits.

    Args:
        line: the connection.
        patience_s: see `GateConfig`.
        options: of uvicorn's protocol.
    """

    def __init__(self, line: Line, patience_s: float, **options: Any) -> None:
        super().__init__(**options)
        self._line = line
        self._patience_s = patience_s
        self._head: int | None = None
        self._due: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._line.cut = transport.abort
        self._await_head()

    def data_received(self, data: bytes) -> None:
        if self._head is not None:
            self._head += len(data)
        super().data_received(data)
        if len(self.pipeline) > 1 or (self._head or 0) > MOST_HEAD:
            self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {LINE: {"line": self._line}}

    def on_headers_complete(self) -> None:
        self._head = None
        self._line.busy = True
        _cancel(self._due)
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        self._line.busy = bool(self.pipeline)
        super().on_response_complete()
        if not (self._line.busy or self.transport.is_closing()):
            self._await_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        _cancel(self._stalled)
        wait_s = time_for(self.transport.get_write_buffer_size())
        self._stalled = self.loop.call_later(wait_s, self.transport.abort)

    def resume_writing(self) -> None:
        _cancel(self._stalled)
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._due)
        _cancel(self._stalled)
        self._line.release()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        self._head = 0
        _cancel(self._due)
        # An answer is complete here while most of it may still be on its way over a slow line.
        left = self.transport.get_write_buffer_size()
        self._due = self.loop.call_later(self._patience_s + (time_for(left) if left else 0.0), self.transport.abort)

    def timeout_keep_alive_handler(self) -> None:
        if not self.transport.get_write_buffer_size():
            super().timeout_keep_alive_handler()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


class LimitedServer(uvicorn.Server):
    """Uvicorn's server, which takes connections in by itself.

    Args:
        config: uvicorn's.
        limits: of the gate.
        files: how many this process may have open.
    """

    def __init__(self, config: uvicorn.Config, limits: GateConfig, files: int) -> None:
        super().__init__(config)
        self._limits = limits
        self.lines = Lines(most_lines(limits.connections, files), limits.connections_per_address)
        self.listeners: list[socket.socket] = []
        self._greetings: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, then listen."""
        await super().startup(sockets=[])  # nowhere, by itself
        if self.should_exit:
            return
        try:
            self.listeners = sockets or list(_listeners(self.config))
        except OSError as error:
            logger.error("nobody can listen on %s:%d: %s", self.config.host, self.config.port, error)
            await self.lifespan.shutdown()
            sys.exit(1)
        for listener in self.listeners:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)
        logger.info("at most %d connections at %s:%d", self.lines.most, self.config.host, self.config.port)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen no more, and let what is at work end."""
        for listener in self.listeners:
            asyncio.get_running_loop().remove_reader(listener)
        for greeting in self._greetings:
            greeting.cancel()
        self.lines.cut_held()
        await super().shutdown(sockets=self.listeners)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            try:
                peer, address = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no files left, whoever has them
                logger.error("no connection can be taken in: %s", error)
                self.lines.cut_oldest()
                loop = asyncio.get_running_loop()
                loop.remove_reader(listener)
                loop.call_later(_NO_FILES_S, self._accept_again, listener)
                return
            peer.setblocking(False)
            line = self.lines.admit(str(address[0]), partial(_hang_up, peer))
            if line is None:
                _reset(peer)
                continue
            greeting = asyncio.get_running_loop().create_task(self._greet(peer, line))
            self._greetings.add(greeting)
            greeting.add_done_callback(self._greetings.discard)

    def _accept_again(self, listener: socket.socket) -> None:
        if not self.should_exit:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    async def _greet(self, peer: socket.socket, line: Line) -> None:
        """Agree on TLS, and begin with HTTP."""
        secure = {}
        if self.config.ssl is not None:
            secure = {"ssl_handshake_timeout": self._limits.patience_s, "ssl_shutdown_timeout": END_S}
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                partial(self._protocol, line), peer, ssl=self.config.ssl, **secure
            )
        except (OSError, asyncio.CancelledError):  # the peer's TLS is none, or it went, or was too slow
            line.release()

    def _protocol(self, line: Line) -> LimitedProtocol:
        return LimitedProtocol(
            line,
            self._limits.patience_s,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )


def _listeners(config: uvicorn.Config) -> Iterator[socket.socket]:
    """Sockets at all addresses of the host, as `asyncio.loop.create_server` makes them."""
    for family, kind, protocol, _, address in socket.getaddrinfo(
        config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    ):
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(config.backlog)
        listener.setblocking(False)
        yield listener


def _hang_up(peer: socket.socket) -> None:
    """End a connection whose TLS is not agreed yet; its socket is the event loop's, and closed by it."""
    try:
        peer.shutdown(socket.SHUT_RDWR)
    except OSError:
        logger.debug("a connection was gone before it was ended")


def _reset(peer: socket.socket) -> None:
    """End a connection that nobody has begun with, so that nothing of it is left."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()


def say_less(flowers: logging.Logger) -> None:
    """Spare Flower records of what no log of this process shows, and a line for each answer of a silo.

    It makes ten records for an order, of which no more than that line is ever written; the journal has each answer.
    """
    flowers.setLevel(min((each.level for each in flowers.handlers), default=0) or logging.DEBUG)
    flowers.addFilter(lambda record: not str(record.msg).startswith(_EACH_ANSWER))


def serve_within(limits: GateConfig) -> None:
    """Have the SuperLink that this process becomes take connections in within limits."""
    # The package has a function of the module's name.
    program = import_module("flwr.superlink.cli.flower_superlink")
    files = raise_file_limit()

    def run(*, app: Any, reload: bool, workers: int, access_log: bool, **options: Any) -> None:
        config = uvicorn.Config(app, ws="none", server_header=False, access_log=False, **options)
        server = LimitedServer(config, limits, files)
        settle()
        say_less(logging.getLogger("flwr"))
        server.run()
        if not server.started:
            sys.exit(3)

    vars(program)["uvicorn"] = SimpleNamespace(run=run)
