"""Who may ask a SuperLink for what, and how much of it at a time.

One port of the SuperLink serves three interfaces. Flower reads a request as a whole before it asks who sends it, bounds
nothing, and asks operators for no account. So each request is judged by its head first:

| path | from | who |
|---|---|---|
| ``/health`` | anywhere | anybody, without a body |
| ``/v1/fleet/`` | anywhere | registered nodes; without TLS and keys also one that registers itself |
| ``/v1/fedsync/`` | anywhere | registered nodes: `fedsync.flower.internals.parcel_routes` and `bundle_routes` answer |
| ``/v1/runtime/`` | the server's machine | the SuperExec, and apps that it has started; below ``fedsync/`` as above |
| ``/v1/control/`` and all else | the server's machine | operators, who have the secret of the server's user |

A node's heartbeats, and what it asks of runs, are answered here, too, without Flower's middlewares. A request that
passes has a place among those of its sender (`fedsync.flower.internals.shares`), and so many seconds for its body. It
has to say how long it is. Silos need no long ones: Flower cuts arrays into parts of 5 MiB, each of which is a request.
All others are answered and cut off; what came with them is not read.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsync.config.gate import GateConfig
from fedsync.core import foreign
from fedsync.flower.internals.bundle_routes import BundleRoutes
from fedsync.flower.internals.bundles import APP_PREFIX, MOST_BYTES, NODE_PATHS, PUSH
from fedsync.flower.internals.callers import Callers, Headers
from fedsync.flower.internals.heartbeats import hear_heartbeats
from fedsync.flower.internals.known_runs import RUN_PATHS, KnownRuns
from fedsync.flower.internals.leftovers import forget_old_logs, forget_runs_that_are_over
from fedsync.flower.internals.lines import TRUSTED, Line
from fedsync.flower.internals.operator import read_secret
from fedsync.flower.internals.parcel_routes import HELD_BYTES, MAX_PART_BYTES, PREFIX, NoParcel, ParcelRoutes
from fedsync.flower.internals.replies import guard_replies
from fedsync.flower.internals.serving import LINE, serve_within, time_for
from fedsync.flower.internals.shares import NoPlaceError, Shares
from fedsync.flower.parcels import FOLDER, tidy_up
from fedsync.identity.node_keys import claimed_fingerprint

logger = foreign.logger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_REQUEST_BYTES = 2**24
"""Largest request of a silo: three parts of an array, or the names of the parts of a model of 100 000 tensors."""

MAX_SMALL_BYTES = 2**16
"""Largest request that carries no data."""

NOBODY = -1
"""Whose share those have that register themselves, where nodes are not authenticated. No node has this number."""

_FLEET, _RUNTIME, _CONTROL = "/v1/fleet/", "/v1/runtime/", "/v1/control/"
_MOST = {"/v1/fleet/push-object": MAX_REQUEST_BYTES, "/v1/fleet/push-messages": MAX_REQUEST_BYTES, PUSH: MOST_BYTES}
_REGISTER, _ACTIVATE = "/v1/fleet/register-node", "/v1/fleet/activate-node"
_DIGITS = 20
_MOST_PATH = 200
_NO_NODE = "not a registered node"
_ONCE = (b"authorization", b"content-length", b"content-range", b"range", b"flwr-")


class TurnedAway(Exception):
    """A request that is not passed on: status and text of the answer."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(status, text)
        self.status = status
        self.text = text


@dataclass(frozen=True, slots=True)
class Judged:
    """A request that is passed on.

    Args:
        owner: whose it is; None for anybody's.
        size: how long its body is; None for any length.
        parcel: it is for the gate's own routes.
    """

    owner: int | None
    size: int | None
    parcel: bool = False

    @property
    def held(self) -> int:
        """Bytes of memory that it takes: of a file that comes or goes, a few spans."""
        return HELD_BYTES if self.parcel else self.size or 0


def _from_here(host: str | None, own: str | None) -> bool:
    """Whether a client at the address ``host`` of the server's address ``own`` is on the server's machine."""
    if host is not None and host == own:
        return True
    try:
        address = ipaddress.ip_address(host or "")
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _headers(scope: Scope) -> Headers:
    found: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        if name in found and name.startswith(_ONCE):
            raise TurnedAway(400, "the same header twice")
        found[name] = value
    return found


def _length(headers: Headers, most: int) -> int:
    """Length that a request says it has."""
    length = headers.get(b"content-length", b"0")
    if b"transfer-encoding" in headers or not length.isdigit():
        raise TurnedAway(411, "say how long the request is")
    if len(length) > _DIGITS or int(length) > most:
        raise TurnedAway(413, "too long a request")
    return int(length)


class AccessMiddleware:
    """Answers requests itself that are not by those who may ask, or are too long, or too many.

    Args:
        app: what is behind it, an ASGI application.
        callers: knows who asks; first used with the first request.
        shares: what each may take at a time.
        authenticated: whether nodes are registered by the operator only.
        parcels: answers what is for the gate itself; None where nothing is.
        bundles: likewise.
        runs: answers what nodes ask of runs; None where Flower does.
    """

    def __init__(
        self,
        app: App,
        callers: Callers,
        shares: Shares,
        *,
        authenticated: bool,
        parcels: ParcelRoutes | None = None,
        bundles: BundleRoutes | None = None,
        runs: KnownRuns | None = None,
    ) -> None:
        self._app = app
        self._callers = callers
        self._shares = shares
        self._authenticated = authenticated
        self._parcels = parcels
        self._bundles = bundles
        self._runs = runs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        try:
            judged = await self._judge(scope)
            _note(scope, judged.owner)
            if judged.owner in (None, TRUSTED):
                await self._trusted(scope, receive, send)
            else:
                await self._passed_on(scope, receive, send, judged)
        except (TurnedAway, NoParcel) as refused:
            if isinstance(refused, TurnedAway):
                _log(scope, refused)
            await _answer(send, refused)

    async def _trusted(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._bundles is not None and str(scope["path"]).startswith(APP_PREFIX):
            await self._bundles.serve_app(_headers(scope)[b"flwr-task-token"], scope, receive, send, _line(scope))
        else:
            await self._app(scope, receive, send)

    async def _passed_on(self, scope: Scope, receive: Receive, send: Send, judged: Judged) -> None:
        size, owner = judged.size or 0, judged.owner or 0
        entered = False
        try:
            async with self._shares.share(owner, judged.held):
                entered = True
                received = _in_time(receive, scope, time_for(size))
                if scope["path"] in NODE_PATHS and self._bundles is not None:
                    await self._bundles.serve(owner, scope, received, send, _line(scope))
                elif scope["path"] in RUN_PATHS and self._runs is not None:
                    await self._runs.serve(owner, scope, received, send, self._app)
                elif judged.parcel and self._parcels is not None:
                    await self._parcels.serve(owner, scope, received, send)
                else:
                    await self._app(scope, received, send)
        except NoPlaceError:
            if entered:
                raise
            raise TurnedAway(503, "too many requests at a time") from None

    async def _judge(self, scope: Scope) -> Judged:
        """Whose request it is, and how long.

        Raises:
            TurnedAway: it is not passed on.
        """
        path = str(scope["path"])
        headers = _headers(scope)
        if path == "/health":
            return Judged(None, _length(headers, 0))
        if path.startswith(_FLEET) or (path.startswith(PREFIX) and self._parcels is not None):
            return await self._judge_node(path, headers)
        client, server = (address[0] if address else None for address in (scope.get("client"), scope.get("server")))
        if not _from_here(client, server):
            raise TurnedAway(403, "only from the machine of the server")
        if path == f"{_RUNTIME}acquire-task":
            if not self._callers.is_superexec(headers):
                raise TurnedAway(401, "not the server's SuperExec")
            return Judged(TRUSTED, _length(headers, MAX_SMALL_BYTES))
        if path.startswith(_RUNTIME):
            if not await self._callers.is_app(headers):
                raise TurnedAway(401, "not an app that runs")
        elif not self._callers.is_operator(headers):
            raise TurnedAway(401, "show the secret of the server's user; see docs/deployment.md")
        return Judged(TRUSTED, None)

    async def _judge_node(self, path: str, headers: Headers) -> Judged:
        parcel = path.startswith(PREFIX) and path not in NODE_PATHS
        size = _length(headers, MAX_PART_BYTES if parcel else _MOST.get(path, MAX_SMALL_BYTES))
        if path == _REGISTER and not self._authenticated:
            return Judged(NOBODY, size)
        node = await self._callers.node(headers)
        if node is None:
            # A SuperNode takes 401 for the end of a session that it had, and 412 for one that it does not get.
            raise TurnedAway(412 if path in (_REGISTER, _ACTIVATE) else 401, _NO_NODE)
        return Judged(node, size, parcel)


def _log(scope: Scope, refused: TurnedAway) -> None:
    """Say who was turned away: nothing that the stranger wrote is believed."""
    client, key = scope.get("client"), dict(scope["headers"]).get(b"flwr-public-key")
    shown = ""
    if key is not None:
        with contextlib.suppress(binascii.Error):
            shown = f", key {claimed_fingerprint(base64.b64decode(key, validate=True))}"
    path, where = str(scope["path"])[:_MOST_PATH], client[0] if client else "nowhere"
    why = "no registered node proves to have sent it" if refused.text == _NO_NODE else refused.text
    logger.warning("[%s] refused: %s; %d to %s%s", path, why, refused.status, where, shown)


def _note(scope: Scope, owner: int | None) -> None:
    """Note whose the connection is."""
    line = _line(scope)
    if line is not None and owner is not None and owner != NOBODY and not line.belongs_to(owner):
        raise TurnedAway(503, "too many connections")


def _line(scope: Scope) -> Line | None:
    """The connection that a request came on, where `fedsync.flower.internals.serving` serves."""
    found = scope.get("extensions", {}).get(LINE, {}).get("line")
    return found if isinstance(found, Line) else None


def _in_time(receive: Receive, scope: Scope, seconds: float) -> Receive:
    """As ``receive``, until the body is there; a peer that is slower is gone."""
    loop = asyncio.get_running_loop()
    due_s, there = loop.time() + seconds, False

    async def timed() -> MutableMapping[str, Any]:
        nonlocal there
        if there:
            return await receive()
        try:
            async with asyncio.timeout_at(due_s):
                message = await receive()
        except TimeoutError:
            there = True
            line = _line(scope)
            if line is not None:
                line.cut()
            return {"type": "http.disconnect"}
        there = not message.get("more_body", False)
        return message

    return timed


async def _answer(send: Send, refused: TurnedAway | NoParcel) -> None:
    text = f"{refused.text}\n".encode()
    headers = [
        (b"content-type", b"text/plain"),
        (b"content-length", str(len(text)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": text})


def put_gate_before_superlink(limits: GateConfig, state: Path) -> None:
    """Have the SuperLink that this process becomes stand behind a gate.

    Args:
        limits: of it.
        state: the server's state folder, where the secret of operators is.
    """
    from flwr.superlink import main

    create, secret = main.create_app, read_secret(state)
    tidy_up(state / FOLDER)
    serve_within(limits)
    guard_replies(limits)

    def create_behind_gate(*arguments: Any, **options: Any) -> Any:
        app = create(*arguments, **options)
        add_gate(app, limits, secret, state / FOLDER)
        return app

    vars(main)["create_app"] = create_behind_gate


def add_gate(app: Any, limits: GateConfig, secret: str, parcels: Path) -> None:
    """Put a gate before a SuperLink's application.

    Args:
        app: Flower's.
        limits: of the gate.
        secret: of operators.
        parcels: the folder of `fedsync.flower.parcels`.
    """
    from flwr.superlink.routers.fleet import node_auth

    callers = Callers(app.state.linkstate_factory.state, secret, app.state.superexec_auth_secret)
    vars(node_auth)["verify_signature"] = callers.verified
    shares = Shares(limits.memory_bytes)
    state = app.state.linkstate_factory.state()
    bundles = BundleRoutes(app.state.linkstate_factory.state, hear_heartbeats(state))
    bundles.watch()
    forget_runs_that_are_over(state)
    forget_old_logs(state)
    app.add_middleware(
        AccessMiddleware,
        callers=callers,
        shares=shares,
        authenticated=app.state.enable_supernode_auth,
        parcels=ParcelRoutes(parcels, limits.waiting_bytes),
        bundles=bundles,
        runs=KnownRuns(app.state.linkstate_factory.state),
    )
