"""What SuperNodes ask of a run when they hear of it first, read once for all of them.

Each asks for the run, and then for its app. Where a thousand join at once, each question is read of the database by
SQLAlchemy's mapper, behind Flower's middlewares, and says the same. Here:

| asked for | answered by |
|---|---|
| a run, or an app, that was read within `KNOWN_S` | Flower's handler, with what was read then |
| one that was not | Flower's handler, which reads it |
| what Flower's handler refuses | Flower's own route, which says why |

So Flower decides for each node if it may know of the run. That a run has ended, a node may hear so much later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import TYPE_CHECKING, Any

from anyio import CapacityLimiter
from anyio.to_thread import run_sync

from fedsync.flower.internals.bundles import body_of
from fedsync.flower.internals.parcel_routes import Receive, Scope, Send, reply

if TYPE_CHECKING:
    from flwr.server.superlink.linkstate import LinkState

KNOWN_S = 1.0
"""How long what was read of a run is taken for what it is [s]."""

GET_RUN, GET_FAB = "/v1/fleet/get-run", "/v1/fleet/get-fab"
RUN_PATHS = (GET_RUN, GET_FAB)

_MOST_BYTES = 2**12
"""Of a request: numbers, and a digest."""

_MOST = 16
"""Things of runs that are known at once; an app may have megabytes."""

App = Callable[[Scope, Receive, Send], Any]


class KnownRuns:
    """Answers what nodes ask of runs.

    Args:
        state: of the SuperLink.
        clock: seconds, from anywhere.
    """

    def __init__(self, state: Callable[[], LinkState], clock: Callable[[], float] = time.monotonic) -> None:
        self._read: _ReadOnce | None = None
        self._state, self._clock = state, clock
        self._thread = CapacityLimiter(1)

    async def serve(self, node: int, scope: Scope, receive: Receive, send: Send, app: App) -> None:
        """Answer a node's request, or have Flower's application answer it.

        Args:
            node: who asks; its share is taken.
            scope: of the request, to one of `RUN_PATHS`.
            receive: of the request.
            send: of the request.
            app: Flower's.

        Raises:
            NoParcel: it is longer than such a request is.
        """
        body = await body_of(scope, receive, _MOST_BYTES)
        answer = await run_sync(self._answered, str(scope["path"]), node, body, limiter=self._thread)
        if answer is None:
            await app(scope, _again(body, receive), send)
        else:
            await reply(send, 200, answer)

    def _answered(self, path: str, node: int, body: bytes) -> bytes | None:
        """What Flower's handler says; None where that is not what was asked for."""
        from flwr.proto.fab_pb2 import GetFabRequest
        from flwr.proto.run_pb2 import GetRunRequest
        from flwr.supercore.error import FlowerError
        from flwr.superlink.servicer.fleet import fleet_handlers
        from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

        if self._read is None:
            self._read = _ReadOnce(self._state(), self._clock)
        state: Any = self._read
        try:
            if path == GET_RUN:
                run = GetRunRequest.FromString(body)
                answer: Any = fleet_handlers.get_run(run, state) if run.node.node_id == node else None
            else:
                fab = GetFabRequest.FromString(body)
                answer = fleet_handlers.get_fab(fab, state) if fab.node.node_id == node else None
        except (FlowerError, DecodeError):
            return None
        return None if answer is None else answer.SerializeToString()


class _ReadOnce:
    """A SuperLink's state as Flower's handlers ask it for runs. What is not here is its own."""

    def __init__(self, state: Any, clock: Callable[[], float]) -> None:
        self._state, self._clock = state, clock
        self._lock = threading.Lock()
        self._known: dict[Hashable, tuple[float, Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    def get_run_info(self, *, run_ids: Sequence[int]) -> Any:
        return self._once(("run", *run_ids), lambda: self._state.get_run_info(run_ids=run_ids))

    def get_run_status(self, run_ids: Collection[int]) -> Any:
        return self._once(("status", *run_ids), lambda: self._state.get_run_status(run_ids))

    def get_fab(self, fab_hash: str) -> Any:
        return self._once(("fab", fab_hash), lambda: self._state.get_fab(fab_hash))

    def _once(self, what: Hashable, read: Callable[[], Any]) -> Any:
        with self._lock:
            due_s, found = self._known.get(what, (self._clock(), None))
            if due_s <= self._clock():
                self._known.pop(what, None)
                while len(self._known) >= _MOST:
                    del self._known[next(iter(self._known))]
                # From before it was read: that is how old it may be.
                due_s = self._clock() + KNOWN_S
                found = read()
                self._known[what] = due_s, found
            return found


def _again(body: bytes, receive: Receive) -> Receive:
    """As ``receive``, for who has to read the body a second time."""
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def received() -> Any:
        return left.pop() if left else await receive()

    return received
