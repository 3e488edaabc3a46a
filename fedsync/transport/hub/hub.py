"""Hub: the server's own HTTPS transport to silos, instead of Flower's messages; see `fedsync.transport.hub.door`."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from fedsync.common.errors import ConfigError, PolicyError
from fedsync.common.files import private_folder
from fedsync.common.locks import wait_until
from fedsync.common.processes import listen_error
from fedsync.model.transfer import Payload
from fedsync.transport.hub.blobs import Blobs
from fedsync.transport.hub.door import BODY_S, KNOWN, Door
from fedsync.transport.hub.sessions import Queued, Sessions
from fedsync.transport.join import Join
from fedsync.transport.port import BESIDE_BYTES, Blob, SiloAnswer, SiloQuestion

# Timeouts of a connection that is idle or has an incomplete request head: after an authenticated request, and before.
QUIET_S, STRANGER_S = 75.0, 10.0

_HEAD_BYTES = 16_384
_MOST_PEERS = 4096  # connections, including unauthenticated ones

_START_S = 60.0
_CLOSE_S, _TELL_S = 2.0, 2.0


class Hub:
    """Server end of the connection to silos: sends questions, receives answers. Sessions are on disk: after a restart
    in the same folder, silos continue with their next request.
    """

    def __init__(self, folder: Path) -> None:
        private_folder(folder)
        self._lock = threading.RLock()
        self._sessions, self._blobs = Sessions(folder / "sessions.json"), Blobs(folder)
        self._sessions.dropped, self.run = self._forget_ticket, self._sessions.run
        self._deliveries: SimpleQueue[SiloAnswer] = SimpleQueue()
        self._door = Door(self._sessions, self._blobs, self._delivered, self._lock)
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self._socket: Path | None = None

    def start(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        certificate: Path | None = None,
        key: Path | None = None,
        socket: Path | None = None,
    ) -> int:
        """Serve in a separate thread; return the port, 0 for a socket.

        ``port`` 0 finds a free port. ``certificate`` is the PEM of the server's certificate, with ``key``; None for no
        TLS, as behind a proxy. ``socket`` is a Unix socket to listen at, instead of host and port. `ConfigError` if the
        address is unavailable, or the certificate cannot be read.
        """
        config = uvicorn.Config(
            self._door.app, host=host, port=port, uds=None if socket is None else str(socket),
            ssl_certfile=certificate, ssl_keyfile=key, http=Deadlines, log_level="critical", access_log=False,
            timeout_keep_alive=int(QUIET_S), backlog=2048, lifespan="off", interface="asgi3", server_header=False,
            date_header=False, limit_concurrency=_MOST_PEERS, h11_max_incomplete_event_size=_HEAD_BYTES, ws="none",
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        failure: list[BaseException] = []
        self._thread = threading.Thread(target=self._serve, args=(failure,), name="hub", daemon=True)
        self._thread.start()
        server, thread = self._server, self._thread
        wait_until(lambda: server.started or not thread.is_alive(), _START_S, 0.005)
        if not server.started:
            why = str(failure[0]) if failure else "nothing answers there"
            where, remedy = f"{host}:{port}", "Free a port, raise hub.runs, or correct host or certificates"
            if socket is not None:
                where, remedy = str(socket), "Name a writable folder with a short path in hub.sockets"
            raise ConfigError("hub", f"cannot listen at {where}: {why}", f"{remedy} in server.yaml")
        if socket is not None:
            self._socket = socket
            socket.chmod(0o660)  # the folder's mode restricts access further
            return 0
        return int(self._server.servers[0].sockets[0].getsockname()[1])

    def _serve(self, failure: list[BaseException]) -> None:
        assert self._server is not None
        try:
            self._server.run()
        except (OSError, ValueError) as error:
            failure.append(error)
        except SystemExit as error:  # uvicorn only logs why it cannot listen
            failure.append(listen_error(self._server.config.host, self._server.config.port) or error)

    def close(self, *, over: bool = True) -> None:
        """Stop. With ``over``, silos are told that the run is over; otherwise they wait for another server."""
        self._door.over = over
        with self._lock:
            self._sessions.wake()
        if self._server is not None and self._thread is not None:
            wait_until(lambda: not (over and self.peers().keys() - self._door.told), _TELL_S, 0.02)
            self._server.should_exit = True
            self._thread.join(_CLOSE_S)
            self._server.force_exit = True
            self._thread.join(_CLOSE_S)
        if self._socket is not None:
            self._socket.unlink(missing_ok=True)

    # Silos.

    def invite(self, silo: str, addresses: Collection[str], authority: str) -> Join:
        """Return a join for a silo, which no other silo may get; arguments as in `Join`."""
        with self._lock:
            return Join(tuple(addresses), self._sessions.invite(silo), authority, self._sessions.run, silo)

    def peers(self) -> dict[str, str]:
        """Return the connected silos with a session identifier, which changes if a silo has lost its questions."""
        with self._lock:
            return self._sessions.silos

    def returns(self, silo: str) -> bool:
        with self._lock:
            return self._sessions.returns(silo)

    def strike_off(self, silo: str) -> None:
        with self._lock:
            self._sessions.strike_off(silo)

    # Questions and answers.

    def send(self, silo: str, question: SiloQuestion) -> str | None:
        """Send a question; return its name, or None if the silo has no session. `PolicyError` if the payload is too
        large for a message, or too many questions are unanswered.
        """
        payload = question.payload
        if payload is not None and not isinstance(payload, Blob) and payload.nbytes > BESIDE_BYTES:
            raise PolicyError(f"{payload.nbytes} bytes beside a question: publish them as a blob")
        with self._lock:
            ticket = self._blobs.expect(silo, question.most) if question.most > BESIDE_BYTES else ""
            name = self._sessions.queue(silo, question, ticket=ticket)
            if name is None and ticket:
                self._blobs.forget(ticket)
            return name

    def receive(self, wait_s: float = 0.0) -> list[SiloAnswer]:
        """Return new answers; wait up to ``wait_s`` for the first."""
        found: list[SiloAnswer] = []
        try:
            found.append(self._deliveries.get(timeout=wait_s) if wait_s > 0 else self._deliveries.get_nowait())
            while True:
                found.append(self._deliveries.get_nowait())
        except Empty:
            return found

    def forget(self, name: str) -> None:
        with self._lock:
            queued = self._sessions.forget(name)
            if queued is not None:
                self._forget_ticket(queued)

    def _forget_ticket(self, queued: Queued) -> None:
        if queued.ticket:
            self._blobs.forget(queued.ticket)

    def _delivered(self, queued: Queued, delivery: SiloAnswer) -> None:
        self._forget_ticket(queued)
        self._deliveries.put(delivery)

    # Blobs.

    def publish(self, payload: Payload) -> Blob:
        return self._blobs.publish(payload)

    def keep(self, digests: Collection[str]) -> None:
        """Delete all blobs but these and those of unanswered questions."""
        with self._lock:
            self._blobs.keep({*digests, *self._sessions.blobs})


class Deadlines(H11Protocol):
    """HTTP protocol with timeouts for idle or unauthenticated peers, incomplete request heads and unread responses.
    Unauthenticated connections may take half of the connection limit. Beyond this, the oldest of them is closed.
    """

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._strangers: dict[Deadlines, None] = vars(self.server_state).setdefault("strangers", {})
        self._strangers[self] = None
        if len(self._strangers) > (self.limit_concurrency or 0) // 2:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.transport.abort()
        self._busy_s, self._known, self._waiting, self._stuck = time.monotonic(), False, 0, 0
        self._timer = self.loop.call_later(STRANGER_S / 4, self._look)

    def _look(self) -> None:
        if self.transport.is_closing():
            return
        if self.cycle is not None:
            self._known |= bool(self.cycle.scope.get(KNOWN))
            if self._known:
                self._strangers.pop(self, None)
            if self._known and not self.cycle.response_complete:
                self._busy_s = time.monotonic()
        before, self._waiting = self._waiting, self.transport.get_write_buffer_size()
        self._stuck = self._stuck + 1 if 0 < self._waiting == before else 0
        if self._stuck * STRANGER_S / 4 > BODY_S:
            self.transport.abort()  # the peer reads nothing of the response
            return
        if time.monotonic() - self._busy_s > (QUIET_S if self._known else STRANGER_S):
            self.transport.abort()
            return
        self._timer = self.loop.call_later(STRANGER_S / 4, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._strangers.pop(self, None)
        super().connection_lost(exc)
