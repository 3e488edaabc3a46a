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
``SameSite=Strict``) and a key. Every request about the run needs cookie and key. Operator commands go through
`fedsync.server.operator_requests`. Connections are limited like those of unknown callers at a hub.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from importlib.resources import files
from pathlib import Path
from typing import Any, Self

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from fedsync.common import codec
from fedsync.common.errors import ConfigError, FedSyncError
from fedsync.core.operator.operator_commands import OperatorQuestion, said
from fedsync.extras.page.run_view import RunView
from fedsync.server.operator_requests import ask, listens
from fedsync.transport.hub.door import KNOWN
from fedsync.transport.hub.hub import Deadlines

MOST_BYTES = 4096

MOST_AT_ONCE = 32
"""Largest number of connections; half of them without a key."""

_KEY, _TOKEN = "X-FedSync-Key", "token"
_FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
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
    "Server": "FedSync",
    "Connection": "close",
}


class PageServer:
    """HTTP server of one run's page, on loopback. Raises `OSError` if the port is in use."""

    def __init__(
        self,
        folder: Path,
        port: int = 0,
        *,
        steers: bool = True,
        asks: Callable[[Path, OperatorQuestion], None] = ask,
    ) -> None:
        self._socket = socket.create_server(("127.0.0.1", port))
        self.server_port = self._socket.getsockname()[1]
        self.folder, self.steers, self.asks = folder, steers, asks
        self.view = RunView(folder)
        self._token: str | None = secrets.token_urlsafe(32)
        self._cookie, self._key = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        self.hosts = {f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost")}
        self.cookie_name = f"fedsync-{self.server_port}"
        routes = [Route(path, _file, methods=["GET"]) for path in _FILES]
        routes += [Route("/run", self._look, methods=["GET"])]
        routes += [Route(path, self._post, methods=["POST"]) for path in ("/enter", "/ask")]
        self._pages = Starlette(routes=routes, exception_handlers={HTTPException: _not_here})
        config = uvicorn.Config(
            self._app, http=Deadlines, limit_concurrency=MOST_AT_ONCE, headers=list(HEADERS.items()),
            log_level="critical", access_log=False, server_header=False, date_header=False, lifespan="off",
            interface="asgi3", ws="none", timeout_graceful_shutdown=1,
        )  # fmt: skip
        self._server = uvicorn.Server(config)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._socket.close()

    def serve_forever(self) -> None:
        self._server.run(sockets=[self._socket])

    def shutdown(self) -> None:
        self._server.should_exit = True

    @property
    def link(self) -> str:
        """Link with a token that is valid once, for one browser."""
        return f"http://127.0.0.1:{self.server_port}/#{self._token}"

    def enter(self, token: str) -> tuple[str, str] | None:
        """Return cookie and key for the link's token, at the first use only; None otherwise."""
        if self._token is None or not _same(token, self._token):
            return None
        self._token = None
        return self._cookie, self._key

    def knows(self, cookie: str, key: str) -> bool:
        # A list, so all comparisons run: the response time does not reveal which value is wrong.
        return all([self._token is None, _same(cookie, self._cookie), _same(key, self._key)])

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        ours = len(hosts) == 1 and hosts[0] in self.hosts
        answer = self._pages if ours else _problem(403, "this server has another name")
        await answer(scope, receive, send)

    def _look(self, request: Request) -> Response:
        if (stranger := self._stranger(request)) is not None:
            return stranger
        try:
            return JSONResponse({**self.view.look(), "steers": self.steers and listens(self.folder)})
        except FedSyncError as error:
            return JSONResponse({"problem": str(error), "steers": False})

    async def _post(self, request: Request) -> Response:
        origin = request.headers.get("Origin", "")
        if origin.removeprefix("http://") not in self.hosts or not origin.startswith("http://"):
            return _problem(403, "asked from another page")
        body = await _body(request)
        if body is None:
            return _problem(400, f"JSON of at most {MOST_BYTES} bytes is expected")
        if request.url.path == "/enter":
            return self._enter(body)
        stranger = self._stranger(request)
        return await _apart(lambda: self._ask(body)) if stranger is None else stranger

    def _stranger(self, request: Request) -> Response | None:
        """Return the response to a request without cookie and key; None for others."""
        cookie, key = request.cookies.get(self.cookie_name, ""), request.headers.get(_KEY, "")
        if not self.knows(cookie, key):
            return _problem(401, "open the link that `fedsync page` printed; it opens once, in one tab")
        request.scope[KNOWN] = True
        return None

    def _enter(self, body: dict[str, Any]) -> Response:
        entered = self.enter(str(body.get(_TOKEN, "")))
        if entered is None:
            return _problem(401, "the link was used already, or is invalid; start `fedsync page` again")
        cookie, key = entered
        flags = f"{self.cookie_name}={cookie}; HttpOnly; SameSite=Strict; Path=/"
        return JSONResponse({"key": key}, headers={"Set-Cookie": flags})

    def _ask(self, body: dict[str, Any]) -> Response:
        if not self.steers:
            return _problem(403, "this page only shows: it was started with --read-only")
        try:
            question: OperatorQuestion = codec.decode(OperatorQuestion, body)
            self.asks(self.folder, question)
        except codec.DecodeError as error:
            return _problem(400, f"not a valid request to a run: {error}")
        except ConfigError as error:
            return _problem(409, error.problem)
        except FedSyncError as error:
            return _problem(504, str(error))
        return JSONResponse({"done": said(question)})


async def _apart(answer: Callable[[], Response]) -> Response:
    """Call ``answer`` in a daemon thread: a run answers within a minute, and the end of this process waits for none."""
    done = Future[Response]()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(answer())
        except Exception as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(done)


def _same(told: str, secret: str) -> bool:
    return hmac.compare_digest(told.encode("utf-8", "replace"), secret.encode())


def _problem(status: int, problem: str) -> Response:
    return JSONResponse({"problem": problem}, status)


def _not_here(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _problem(error.status_code, "there is no such page")


def _file(request: Request) -> Response:
    name, kind = _FILES[request.url.path]
    return Response((files(__package__) / name).read_bytes(), media_type=kind)


async def _body(request: Request) -> dict[str, Any] | None:
    """Read a JSON object; None for other content, or more than `MOST_BYTES`."""
    length, kind = request.headers.get("Content-Length", ""), request.headers.get("Content-Type", "")
    if not length.isdecimal() or int(length) > MOST_BYTES or request.headers.get("Transfer-Encoding") is not None:
        return None
    if kind.partition(";")[0].strip() != "application/json":
        return None
    try:
        body = await request.json()
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None
