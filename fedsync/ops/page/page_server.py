"""HTTP server of a run's live page, on loopback, for the operator who started it.

Threats and countermeasures:

| threat | countermeasure |
|---|---|
| another machine | the server listens on 127.0.0.1 only |
| another user of this machine | responses about the run need a key; only the first holder of the link gets this key |
| a web page in the same browser | the key is in a header that other origins cannot send; `Origin` is checked too |
| DNS rebinding to 127.0.0.1 | `Host` must be 127.0.0.1 or localhost, with the port |
| another loopback server, which receives cookies of all ports | the cookie alone gives no access |
| a silo with a hostile name or reason | the page inserts text only; its content policy allows only its own script |
| leaks through logs, history or `Referer` | the token is behind ``#``, which browsers never send, and is valid once |

The link is ``http://127.0.0.1:PORT/#TOKEN``. The page sends the token once, and receives a cookie (``HttpOnly``,
``SameSite=Strict``) and a key. Every request about the run needs both. Operator commands go through
`fedsync.server.operator_requests`.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedsync.common import codec, foreign
from fedsync.common.errors import ConfigError, FedSyncError
from fedsync.core.operator.operator_commands import OperatorQuestion, said
from fedsync.observe.run_view import RunView
from fedsync.server.operator_requests import ask, listens

logger = foreign.logger(__name__)

MOST_BYTES = 4096

MOST_AT_ONCE = 16

_TIME_S = 10.0
"""Timeout for receiving a whole request, and for sending its response [s]."""

_KEY, _TOKEN = "X-FedSync-Key", "token"
_FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class PageServer(ThreadingHTTPServer):
    """HTTP server of one run's page, on loopback. Raises `OSError` if the port is in use."""

    daemon_threads = True
    request_queue_size = MOST_AT_ONCE

    def __init__(
        self,
        folder: Path,
        port: int = 0,
        *,
        steers: bool = True,
        asks: Callable[[Path, OperatorQuestion], None] = ask,
    ) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.folder, self.steers, self.asks = folder, steers, asks
        self.view = RunView(folder)
        self._token: str | None = secrets.token_urlsafe(32)
        self._cookie, self._key = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        self._entering = threading.Lock()
        self.room = threading.BoundedSemaphore(MOST_AT_ONCE)
        self.reading: dict[socket.socket, threading.Timer] = {}
        self.lock = threading.Lock()
        self.hosts = {f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost")}
        self.cookie_name = f"fedsync-{self.server_port}"

    @property
    def link(self) -> str:
        """Link with a token that is valid once, for one browser."""
        return f"http://127.0.0.1:{self.server_port}/#{self._token}"

    def enter(self, token: str) -> tuple[str, str] | None:
        """Return cookie and key for the link's token, at the first use only; None otherwise."""
        with self._entering:
            if self._token is None or not _same(token, self._token):
                return None
            self._token = None
            return self._cookie, self._key

    def knows(self, cookie: str, key: str) -> bool:
        # A list, so all comparisons run: the response time does not reveal which value is wrong.
        return all([self._token is None, _same(cookie, self._cookie), _same(key, self._key)])

    def process_request(self, request: Any, client_address: Any) -> None:
        # At the limit, close the oldest connection without a complete request.
        free = self.room.acquire(blocking=False) or (self._hang_up() and self.room.acquire(timeout=1.0))
        if not free:
            self.shutdown_request(request)
            return
        late = threading.Timer(_TIME_S, self._hang_up, [request])
        late.daemon = True
        with self.lock:
            self.reading[request] = late
        late.start()
        super().process_request(request, client_address)

    def heard(self, request: socket.socket) -> None:
        with self.lock:
            late = self.reading.pop(request, None)
        if late is not None:
            late.cancel()

    def _hang_up(self, request: socket.socket | None = None) -> bool:
        """Close a connection without a complete request, by default the oldest; returns False if there is none."""
        with self.lock:
            request = request or next(iter(self.reading), None)
            late = None if request is None else self.reading.pop(request, None)
            if request is None or late is None:
                return False
            with suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)
        late.cancel()
        return True

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.heard(request)
            self.room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a request to the page failed", exc_info=True)


def _same(told: str, secret: str) -> bool:
    return hmac.compare_digest(told.encode("utf-8", "replace"), secret.encode())


class _Handler(BaseHTTPRequestHandler):
    """Handler of one request; all responses have `HEADERS`, and nothing is logged."""

    server: PageServer
    timeout = _TIME_S

    def version_string(self) -> str:
        return "FedSync"

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer requests that Python's server rejects, such as other methods or too long lines."""
        self.close_connection = True
        self._json(code, {"problem": "this is not served here"})

    def do_GET(self) -> None:
        self.server.heard(self.connection)
        if not self._is_ours():
            return
        if self.path in _FILES:
            name, kind = _FILES[self.path]
            self._send(200, kind, (files(__package__) / name).read_bytes())
        elif self.path == "/run" and self._is_known():
            self._json(200, self._look())
        elif self.path != "/run":
            self._json(404, {"problem": "there is no such page"})

    def do_POST(self) -> None:
        if not self._is_ours():
            return
        origin = self.headers.get("Origin", "")
        if origin.removeprefix("http://") not in self.server.hosts or not origin.startswith("http://"):
            self._json(403, {"problem": "asked from another page"})
            return
        body = self._body()
        self.server.heard(self.connection)
        if body is None:
            self._json(400, {"problem": f"JSON of at most {MOST_BYTES} bytes is expected"})
        elif self.path == "/enter":
            self._enter(body)
        elif self.path == "/ask":
            if self._is_known():
                self._ask(body)
        else:
            self._json(404, {"problem": "there is no such page"})

    def _is_ours(self) -> bool:
        if self.headers.get_all("Host") is not None and self.headers["Host"] in self.server.hosts:
            return True
        self._json(403, {"problem": "this server has another name"})
        return False

    def _is_known(self) -> bool:
        cookies = dict(part.strip().partition("=")[::2] for part in self.headers.get("Cookie", "").split(";"))
        if self.server.knows(cookies.get(self.server.cookie_name, ""), self.headers.get(_KEY, "")):
            return True
        self._json(401, {"problem": "open the link that `fedsync page` printed; it opens once, in one tab"})
        return False

    def _body(self) -> Any:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MOST_BYTES or self.headers.get("Transfer-Encoding") is not None:
            self.close_connection = True
            return None
        if self.headers.get_content_type() != "application/json":
            return None
        try:
            body = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            return None
        return body if isinstance(body, dict) else None

    def _enter(self, body: dict[str, Any]) -> None:
        entered = self.server.enter(str(body.get(_TOKEN, "")))
        if entered is None:
            self._json(401, {"problem": "the link is used up, or is no link; start `fedsync page` again"})
            return
        cookie, key = entered
        self._json(
            200, {"key": key}, {"Set-Cookie": f"{self.server.cookie_name}={cookie}; HttpOnly; SameSite=Strict; Path=/"}
        )

    def _look(self) -> dict[str, Any]:
        steers = self.server.steers and listens(self.server.folder)
        try:
            return {**self.server.view.look(), "steers": steers}
        except FedSyncError as error:
            return {"problem": str(error), "steers": False}

    def _ask(self, body: dict[str, Any]) -> None:
        if not self.server.steers:
            self._json(403, {"problem": "this page only shows: it was started with --read-only"})
            return
        try:
            question: OperatorQuestion = codec.decode(OperatorQuestion, body)
            self.server.asks(self.server.folder, question)
        except codec.DecodeError as error:
            self._json(400, {"problem": f"nothing that can be asked of a run: {error}"})
        except ConfigError as error:
            self._json(409, {"problem": error.problem})
        except FedSyncError as error:
            self._json(504, {"problem": str(error)})
        else:
            self._json(200, {"done": said(question)})

    def _json(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        self._send(status, "application/json", json.dumps(value).encode(), headers)

    def _send(self, status: int, kind: str, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(data)),
            **HEADERS,
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing, because a log would contain data that browsers send."""
