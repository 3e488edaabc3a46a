"""What a silo may put into a SuperLink's database: answers of its own to what it was asked, and not too much at a time.

Flower knows which node sends a request. It believes what the message in it says: who its source is, and that it answers
something. A message that answers nothing is an instruction in the server's name. So:

- the source is the node that sends it, the destination the server, and it names what it answers. That this was asked
  of the same node, in the same run, and has no other answer, Flower sees to then;
- its parts are those of the message, and belong to the session that Flower began for it;
- all of one silo's answers that the app has not fetched yet are so many messages, parts and bytes at most. Above that
  the silo is told to come again, which its SuperNode does by itself.

Flower begins a session before it looks at the message, and keeps it if the message is refused. Here it goes at once.

This takes Flower's handlers apart, so it serves only the versions in `fedsync.flower.internals.versions.TESTED`.
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedsync.config.gate import GateConfig
from fedsync.core import foreign

if TYPE_CHECKING:
    from flwr.proto.fleet_pb2 import PushMessagesRequest, PushMessagesResponse
    from flwr.proto.message_pb2 import PushObjectRequest, PushObjectResponse
    from flwr.supercore.object_store import ObjectStore

logger = foreign.logger(__name__)

MOST_PARTS = 2**16
"""Parts of one silo's answers that wait. Each costs the database three rows."""

MOST_HEAD_BYTES = 2**18
"""A message without its parts: numbers, names, and the text of an error."""

SESSION_S = 180.0
"""Flower ends a session in which nothing came for so long."""


class LieError(Exception):
    """A message is not what its sender may send; says why."""


class FullError(Exception):
    """A silo has no room in the database for now."""


@dataclass(slots=True)
class _Waiting:
    """An answer, or the part of it that came: its first object, parts and bytes, and when something came last."""

    root: str
    parts: int
    bytes: int
    came_s: float


class _Silo:
    """One silo's answers that wait, by session, and how many parts and bytes they are together."""

    def __init__(self) -> None:
        self.sessions: dict[str, _Waiting] = {}
        self.roots: dict[str, str] = {}
        """Session of each answer whose first object is known."""
        self.parts = self.bytes = 0

    def put(self, session: str, waiting: _Waiting) -> None:
        self.pop(session)
        self.sessions[session] = waiting
        if waiting.root:
            self.roots[waiting.root] = session
        self.parts += waiting.parts
        self.bytes += waiting.bytes

    def pop(self, session: str) -> None:
        waiting = self.sessions.pop(session, None)
        if waiting is not None:
            self.roots.pop(waiting.root, None)
            self.parts -= waiting.parts
            self.bytes -= waiting.bytes

    def grow(self, session: str, size: int) -> None:
        self.sessions[session].bytes += size
        self.bytes += size


class Quota:
    """What waits of each silo's answers. Several threads use it. To count a part costs the same however many silos.

    Args:
        limits: how much may.
        clock: seconds.
    """

    def __init__(self, limits: GateConfig, clock: Any = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._silos: defaultdict[int, _Silo] = defaultdict(_Silo)
        self._owners: dict[str, int] = {}
        """Whose each session is."""
        self._lock = threading.Lock()

    def check(self, node: int, root: str, parts: int, store: ObjectStore) -> None:
        """See that there is room for an answer.

        Raises:
            FullError: there is none.
        """
        with self._lock:
            if not self._room(node, root, parts, 0):
                self._forget(node, store)
                if not self._room(node, root, parts, 0):
                    raise FullError(f"node {node} has too many answers that wait, or with too many parts")

    def begin(self, node: int, session: str, root: str, parts: int) -> None:
        """Note an answer, whose parts come in a session; an earlier session for it is over."""
        with self._lock:
            own, size = self._silos[node], 0
            before = own.roots.get(root)
            if before is not None:
                size = own.sessions[before].bytes
                self._drop(node, before)
            self._keep(node, session, _Waiting(root, parts, size, self._clock()))

    def add(self, node: int, session: str, size: int, store: ObjectStore) -> None:
        """Count a part of an answer; a session that is not known was begun before this process.

        Raises:
            LieError: the session is another node's.
            FullError: there is no room for it.
        """
        with self._lock:
            if self._owners.get(session, node) != node:
                raise LieError("the session is another node's")
            if not self._room(node, None, 0, size):
                self._forget(node, store)
                if not self._room(node, None, 0, size):
                    raise FullError(f"node {node} has {self._limits.waiting_bytes} bytes that wait")
            if session not in self._owners:
                self._keep(node, session, _Waiting("", 0, 0, 0.0))
            own = self._silos[node]
            own.grow(session, size)
            own.sessions[session].came_s = self._clock()

    def refund(self, node: int, session: str, size: int) -> None:
        """A part that was counted was not stored."""
        with self._lock:
            if self._owners.get(session) != node:
                return
            own = self._silos[node]
            own.grow(session, -size)
            waiting = own.sessions[session]
            if not (waiting.root or waiting.bytes):
                self._drop(node, session)

    def _keep(self, node: int, session: str, waiting: _Waiting) -> None:
        self._silos[node].put(session, waiting)
        self._owners[session] = node

    def _drop(self, node: int, session: str) -> None:
        self._silos[node].pop(session)
        del self._owners[session]

    def _room(self, node: int, root: str | None, parts: int, size: int) -> bool:
        """Whether there is room for so much more; what waits of an answer that is announced again does not count."""
        own = self._silos[node]
        before = None if root is None else own.sessions.get(own.roots.get(root, ""))
        again, its_parts, its_bytes = (0, 0, 0) if before is None else (1, before.parts, before.bytes)
        return (
            (root is None or len(own.sessions) - again < self._limits.waiting_messages)
            and own.parts - its_parts + parts <= MOST_PARTS
            and own.bytes - its_bytes + size <= self._limits.waiting_bytes
        )

    def _forget(self, node: int, store: ObjectStore) -> None:
        """Drop what the app has fetched, what Flower has removed, and sessions of old that are over."""
        old_s = self._clock() - SESSION_S
        gone = [
            session
            for session, waiting in self._silos[node].sessions.items()
            if (waiting.root not in store if waiting.root else waiting.came_s < old_s)
        ]
        for session in gone:
            self._drop(node, session)


class _Noted:
    """A SuperLink's state that notes which session it began."""

    def __init__(self, state: Any) -> None:
        self._state = state
        self.session: str | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    def start_session(self, run_id: int) -> str:
        self.session = str(self._state.start_session(run_id))
        return self.session

    def forget_session(self) -> None:
        if self.session is not None:
            self._state._cleanup_push_session(self.session, cleanup_messages=False)


def check_reply(request: PushMessagesRequest, store: ObjectStore) -> int:
    """That a message is an answer of the node that sends it; returns how many parts it has.

    Raises:
        LieError: it is not.
    """
    from flwr.common.constant import SUPERLINK_NODE_ID
    from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

    if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
        raise LieError("not one message")
    message, tree = request.messages_list[0], request.message_object_trees[0]
    told = message.metadata
    if told.src_node_id != request.node.node_id:
        raise LieError("its source is another node")
    if told.dst_node_id != SUPERLINK_NODE_ID:
        raise LieError("it is not for the server")
    if not told.reply_to_message_id:
        raise LieError("it answers nothing")
    if message.ByteSize() > MOST_HEAD_BYTES or message.content.ByteSize():
        raise LieError("it has content beside its parts")
    if not _finite((told.created_at, told.ttl, *request.clientapp_runtime_list)):
        raise LieError("a time in it is no number")
    if told.message_id != tree.object_id:
        raise LieError("its parts are another message's")
    parts = [part.object_id for part in iterate_object_tree(tree)]
    if len(parts) > MOST_PARTS:
        raise LieError(f"it has more than {MOST_PARTS} parts")
    if tree.object_id in store:  # it was sent before, and the answer did not arrive
        known = store.get_object_tree(tree.object_id)
        if {part.object_id for part in iterate_object_tree(known)} != set(parts):
            raise LieError("it was sent before, with other parts")
    return len(parts)


def _finite(numbers: Iterable[float]) -> bool:
    return all(math.isfinite(number) for number in numbers)


class Replies:
    """Flower's handlers of what silos send, behind the rules.

    Args:
        handlers: Flower's module of them.
        quota: of all silos.
    """

    def __init__(self, handlers: Any, quota: Quota) -> None:
        self._push_messages = handlers.push_messages
        self._push_object = handlers.push_object
        self._quota = quota

    def push_messages(self, request: PushMessagesRequest, state: Any) -> PushMessagesResponse:
        """Take an answer in, without its parts."""
        node, store, noted = request.node.node_id, state.object_store, _Noted(state)
        try:
            parts = check_reply(request, store)
            root = request.messages_list[0].metadata.message_id
            self._quota.check(node, root, parts, store)
            answer: PushMessagesResponse = self._push_messages(request=request, state=noted)
        except (LieError, FullError) as error:
            raise _refusal(node, error) from None
        except BaseException:
            noted.forget_session()
            raise
        if answer.objects_to_push:
            self._quota.begin(node, answer.session_id, root, parts)
        else:
            noted.forget_session()
        return answer

    def push_object(self, request: PushObjectRequest, state: Any) -> PushObjectResponse:
        """Take a part of an answer in."""
        node, session, size = request.node.node_id, request.session_id, len(request.object_content)
        try:
            if not session:
                raise LieError("a part comes in no session")
            self._quota.add(node, session, size, state.object_store)
        except (LieError, FullError) as error:
            raise _refusal(node, error) from None
        stored = False
        try:
            answer: PushObjectResponse = self._push_object(request=request, state=state)
            stored = answer.stored
        finally:
            if not stored:
                self._quota.refund(node, session, size)
        return answer


def _refusal(node: int, error: LieError | FullError) -> Exception:
    from fastapi import HTTPException

    if isinstance(error, FullError):
        logger.warning("%s: it is told to come again; see gate in server.yaml", error)
        return HTTPException(503, "too much of yours waits; come again")
    logger.error("a message of node %d is refused: %s", node, error)
    return HTTPException(403, str(error))


def guard_replies(limits: GateConfig) -> None:
    """Have the SuperLink that this process becomes take answers only, and not too many."""
    from flwr.superlink.servicer.fleet import fleet_handlers

    replies = Replies(fleet_handlers, Quota(limits))
    vars(fleet_handlers).update(push_messages=replies.push_messages, push_object=replies.push_object)
