"""Flower's client of a SuperLink, for a SuperNode or a ServerApp, that has messages travel with their parts.

See `fedsync.flower.internals.bundles`. Where the SuperLink has no such routes, or does not take a message so, it goes
Flower's own way. It reaches into Flower's clients, for the versions in `fedsync.flower.internals.versions.TESTED` only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from fedsync.flower.internals.bundles import (
    APP_PULL,
    APP_PUSH,
    APP_WAIT,
    APP_WAITING,
    MOST_APP_BYTES,
    MOST_BYTES,
    MOST_FRAMES,
    PULL,
    PULL_NOW,
    PUSH,
    Bundle,
    parts_of,
)

if TYPE_CHECKING:
    from flwr.app import Message

HELD_S = 40.0
"""How long nothing is heard of a request that is held until its connection counts as lost [s].

Longer than the server holds it, by what lost packets take, and shorter than firewalls keep a silent connection."""

HEARD_S = 20.0
"""So long after a look for messages was answered, or an answer taken, a node sends no heartbeat [s].

The next is due 22.5 s later at most, and a node counts as online for 60 s: a slow server has 17 s to hear it."""

ABSENT_S = 60.0
"""How long a SuperLink without the routes is not asked for them again [s]; it may be another one by then."""

_NEVER = float("-inf")


class BundlingClient:
    """Stands in for one of Flower's clients, whose other methods are its own.

    Args:
        client: Flower's.
        pull: path of the route that messages come from; of a node's, where requests are held, or of the app's.
        push: path of the route that they go to.
        most: bytes that may go to it at a time.
    """

    def __init__(self, client: Any, pull: str, push: str, most: int) -> None:
        self._client = client
        self._pull, self._push, self._most = pull, push, most
        self._absent_s = self._heard_s = _NEVER
        self._lock = threading.Lock()
        self._came: dict[str, list[bytes]] = {}
        self._whole: dict[str, list[str]] = {}
        self.outgoing: dict[str, bytes] = {}
        """Parts of the messages that are about to be pushed."""
        self.patient = True
        """Whether a node's look for messages may be held."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def __enter__(self) -> BundlingClient:
        self._client.__enter__()
        return self

    def __exit__(self, *told: object) -> None:
        self._client.__exit__(*told)

    @property
    def bundles(self) -> bool:
        """Whether the SuperLink has the routes, as far as is known."""
        return time.monotonic() - self._absent_s > ABSENT_S

    def wait(self, seconds: float) -> None:
        """Wait until an answer is there that was not when answers were pulled last, or the time is over."""
        until_s = time.monotonic() + seconds
        found = self._ask(f"{APP_WAIT}{int(1e3 * seconds)}", []) if self.bundles and seconds >= 1e-3 else None
        if found is None:
            time.sleep(max(0.0, until_s - time.monotonic()))

    def waiting(self, names: Sequence[str]) -> set[str]:
        """Those of an app's messages that still wait at the SuperLink, or whose answer does, as far as it says so."""
        asked = [name.encode() for name in names]
        told = (self._ask(APP_WAITING, asked[at : at + MOST_FRAMES]) for at in range(0, len(asked), MOST_FRAMES))
        return {name.decode() for found in told for name in found or ()}

    def came_whole(self, name: str, parts: int) -> bool:
        """Whether a message came with all of its so many parts; one that has too many came with none."""
        with self._lock:
            return 0 < parts == len(self._whole.get(name, ()))

    def PullMessages(self, request: Any) -> Any:
        """Messages, whose parts come with them; see Flower's method of this name."""
        if self._pull == APP_PULL:
            frames = self._ask(APP_PULL, [request.SerializeToString()])
        else:
            frames = self._ask(PULL if self.patient else PULL_NOW, [])
            self._heard_s = _NEVER if frames is None else time.monotonic()
        if frames is None:
            return self._client.PullMessages(request)
        found = _answer_to(request)
        if not frames:
            return found
        found.ParseFromString(frames[0])
        rest = iter(frames[1:])
        with self._lock:
            for tree in found.message_object_trees:
                names = parts_of(tree)
                came = [(name, part) for name, part in zip(names, rest, strict=False) if part]
                for name, part in came:
                    self._came.setdefault(name, []).append(part)
                if came:
                    self._whole[tree.object_id] = [name for name, _ in came]
        return found

    def SendNodeHeartbeat(self, request: Any) -> Any:
        """Say that a node lives, unless its looks for messages and its answers do."""
        from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatResponse

        if time.monotonic() - self._heard_s < HEARD_S:
            return SendNodeHeartbeatResponse(success=True)
        return self._client.SendNodeHeartbeat(request)

    def PullObject(self, request: Any) -> Any:
        """A part, which came already or is asked for."""
        from flwr.proto.message_pb2 import PullObjectResponse

        with self._lock:
            came = self._came.get(request.object_id)
        return PullObjectResponse.FromString(came[0]) if came else self._client.PullObject(request)

    def ConfirmMessageReceived(self, request: Any) -> Any:
        """Forget the parts of a message; the SuperLink did so when it sent them with it."""
        from flwr.proto.message_pb2 import ConfirmMessageReceivedResponse

        with self._lock:
            names = self._whole.pop(request.message_object_id, None)
            for name in names or ():
                self._came[name].pop()
                if not self._came[name]:
                    del self._came[name]
        return self._client.ConfirmMessageReceived(request) if names is None else ConfirmMessageReceivedResponse()

    def PushMessages(self, request: Any) -> Any:
        """Push messages with their parts; the answer names the parts that are still to be pushed."""
        from flwr.proto.message_pb2 import PushObjectRequest
        from flwr.proto.node_pb2 import Node

        node = request.node if self._push == PUSH else Node(node_id=request.messages_list[0].metadata.src_node_id)
        names = [name for tree in request.message_object_trees for name in parts_of(tree)]
        parts = [
            PushObjectRequest(
                node=node, run_id=request.messages_list[0].metadata.run_id, object_id=name, object_content=part
            )
            for name, part in ((name, self.outgoing.get(name)) for name in names)
            if part is not None
        ]
        frames = [request.SerializeToString(), *(part.SerializeToString() for part in parts)]
        fits = len(parts) > 0 and sum(len(frame) + 4 for frame in frames) <= self._most
        found = self._ask(self._push, frames) if fits else None
        if not found:
            return self._client.PushMessages(request)
        self._heard_s = time.monotonic()
        answer = _answer_to(request)
        answer.ParseFromString(found[0])
        return answer

    def _ask(self, path: str, frames: list[bytes]) -> list[bytes] | None:
        """Frames of the answer; None where Flower's own way is to be gone."""
        import httpx

        if not self.bundles:
            return None
        try:
            found = self._client._unary_unary(
                path=path, rpc_method=path, request=Bundle(frames), response_type=Bundle, timeout=HELD_S
            )
        except httpx.HTTPStatusError as error:
            if error.response.status_code in (404, 405):
                self._absent_s = time.monotonic()
            elif error.response.status_code != 409:
                raise
            return None
        return list(found.frames)


def _answer_to(request: Any) -> Any:
    """An empty answer of the kind that Flower gives."""
    from importlib import import_module

    kind = type(request)
    return getattr(import_module(kind.__module__), kind.__name__.removesuffix("Request") + "Response")()


def node_client(client: Any) -> BundlingClient:
    """For a SuperNode, whose look for messages is held by the SuperLink until there is one."""
    return BundlingClient(client, PULL, PUSH, MOST_BYTES)


def bundle_messages(grid: Any) -> None:
    """Have the grid of this ServerApp, if there is a SuperLink behind it, send and get messages with their parts."""
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
    from flwr.superlink.grid.http_grid import HttpGrid

    if not isinstance(grid, HttpGrid):
        return
    client = BundlingClient(grid._runtime_client, APP_PULL, APP_PUSH, MOST_APP_BYTES)
    push: Callable[[int, list[Message]], list[str]] = grid._try_push_messages

    def push_with_parts(run_id: int, messages: Iterable[Message]) -> list[str]:
        messages = list(messages)
        parts = (part for message in messages for part in get_all_nested_objects(message).items())
        client.outgoing = {name: part.deflate() for name, part in parts}
        try:
            return push(run_id, messages)
        finally:
            client.outgoing = {}

    vars(grid).update(_client=client, _try_push_messages=push_with_parts)
