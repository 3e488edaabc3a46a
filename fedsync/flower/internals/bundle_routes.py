"""The SuperLink's side of `fedsync.flower.internals.bundles`: held requests, and messages with their parts.

A node that looks for messages is answered when there is one, and an app when there may be an answer for it, so that
whoever waits costs nothing and hears at once. Nothing is polled: the state's own method that stores messages tells it.

| what is known of a node | because | its request |
|---|---|---|
| nothing | this process is new, or something was stored while it was looked | looks |
| no message is left | a look found none | waits |
| so many are left | they were stored since | looks |

A node has one request that waits; its next one takes the place, for a line may break unseen. A request waits at most
`HOLD_S`, which firewalls and proxies stand, and then hears that there is nothing. It counts among the requests of its
node (`fedsync.flower.internals.shares`) and ends with its line.

All decisions about messages are Flower's: its handlers are called, as they are called for its own routes.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from fedsync.core import foreign
from fedsync.flower.internals.answer_looks import AnswerLooks
from fedsync.flower.internals.app_tasks import AppTasks
from fedsync.flower.internals.bundles import (
    APP_PULL,
    APP_PUSH,
    APP_WAIT,
    APP_WAITING,
    HEARTBEAT,
    MOST_APP_BYTES,
    MOST_BYTES,
    PULL,
    PULL_NOW,
    PUSH,
    Bundle,
    body_of,
    frames_of,
    parts_of,
)
from fedsync.flower.internals.heartbeats import Prompt, note_life
from fedsync.flower.internals.lines import Line
from fedsync.flower.internals.one_transaction import (
    add_indexes,
    clean_up_seldom,
    one_transaction,
    wait_patiently,
)
from fedsync.flower.internals.parcel_routes import NoParcel, Receive, Scope, Send, gone, reply
from fedsync.flower.internals.turns import Turns
from fedsync.flower.internals.waiting import still_waiting

if TYPE_CHECKING:
    from flwr.proto.message_pb2 import ObjectTree, PullObjectResponse
    from flwr.server.superlink.linkstate import LinkState

logger = foreign.logger(__name__)

HOLD_S = 16.0
"""How long a request waits [s]. Firewalls forget a silent line after a minute, some after half of one; and who looks so
often sends no heartbeats beside, see `HEARD_S` of `bundle_client`."""

MOST_WAIT_MS = 10_000

MOST_BEAT = 2**10
"""Bytes of a heartbeat; there is a number in it, and how often it comes."""

Ask = Callable[[str], "PullObjectResponse"]


class BundleRoutes:
    """Serves messages with their parts.

    Args:
        state: of the SuperLink.
        hear: notes that a node lives; False where its heartbeat has to be written.
    """

    def __init__(self, state: Callable[[], LinkState], hear: Callable[[int], bool]) -> None:
        self._state = state
        self._hear = hear
        self._loop: asyncio.AbstractEventLoop | None = None
        self._held: dict[int, asyncio.Event] = {}
        self._left: dict[int, int] = {}
        self._stored: Counter[int] = Counter()
        self._runs: dict[bytes, int] = {}
        self._tasks = AppTasks(state)
        self._looks = AnswerLooks()
        self._turns, self._thread, self._prompt = Turns(), ThreadPoolExecutor(1, "bundles"), Prompt()
        self._later = threading.local()

    def watch(self) -> None:
        """Hear from now on of every message that the state stores."""
        state: Any = self._state()
        clean_up_seldom(state)
        wait_patiently(state)
        add_indexes(state)
        store = state.store_message_and_object_tree

        def store_and_tell(message: Any, tree: ObjectTree, session: str) -> tuple[bool, list[str]]:
            done: tuple[bool, list[str]] = store(message, tree, session)
            if done[0]:
                self._tell_of(message)
            return done

        vars(state)["store_message_and_object_tree"] = store_and_tell

    def _tell_of(self, message: Any) -> None:
        told = message.metadata
        answers = told.reply_to_message_id
        self._tell(told.run_id if answers else told.dst_node_id, answers)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Tell of messages that this thread stores when their parts are there too."""
        self._later.whom = []
        try:
            yield
        finally:
            whom, self._later.whom = self._later.whom, None
            for each in whom:
                self._tell(*each)

    def _tell(self, whom: int, answers: str) -> None:
        later = getattr(self._later, "whom", None)
        if later is not None:
            later.append((whom, answers))
        elif self._loop is not None:
            with suppress(RuntimeError):  # it is closed, as is this process soon
                self._loop.call_soon_threadsafe(self._note, whom, answers)

    def _note(self, whom: int, answers: str) -> None:
        """A message for a node is stored, or an answer to a run; both are large random numbers."""
        self._stored[whom] += 1
        if answers:
            self._looks.stored(whom, answers)
        if whom in self._left:
            self._left[whom] += 1
        held = self._held.get(whom)
        if held is not None:
            held.set()

    async def serve(self, node: int, scope: Scope, receive: Receive, send: Send, line: Line | None) -> None:
        """Answer a node's request.

        Raises:
            NoParcel: there is no such route, or Flower refuses it: its own routes say why.
        """
        self._loop = asyncio.get_running_loop()
        if scope["path"] == HEARTBEAT:
            # It takes no time, and whoever waits with it for a thousand others counts as gone.
            beat = await body_of(scope, receive, MOST_BEAT)
            (answer,) = await self._handled(self._beat, node, beat, first=self._prompt.goes_first(node))
            await reply(send, 200, answer)
            return
        if scope["path"] in (PULL, PULL_NOW):
            await self._lives(node)
        if scope["path"] == PULL:
            frames = await self._pull(node, receive, line)
        elif scope["path"] == PULL_NOW:
            frames = [] if self._left.get(node) == 0 else await self._look(node)
        elif scope["path"] == PUSH:
            asked = frames_of(await body_of(scope, receive, MOST_BYTES))
            frames = await self._handled(self._push, node, asked, answers=True)
            await self._lives(node)
        else:
            raise NoParcel(404, "no such route")
        await reply(send, 200, Bundle(frames).SerializeToString())

    async def serve_app(self, token: bytes, scope: Scope, receive: Receive, send: Send, line: Line | None) -> None:
        """Answer a request of an app, whose token is known to be one; raises as `serve`."""
        self._loop = asyncio.get_running_loop()
        path, frames = str(scope["path"]), list[bytes]()
        if path == APP_PULL:
            asked = frames_of(await body_of(scope, receive, MOST_APP_BYTES))
            frames = await self._handled(self._app_pull, token, asked, first=True)
        elif path == APP_PUSH:
            asked = frames_of(await body_of(scope, receive, MOST_APP_BYTES))
            frames = await self._handled(self._app_push, token, asked, first=True)
        elif path == APP_WAITING:
            asked = frames_of(await body_of(scope, receive, MOST_APP_BYTES))
            frames = await self._handled(self._app_waiting, token, asked, first=True)
        elif path.startswith(APP_WAIT) and path.removeprefix(APP_WAIT).isdigit():
            await self._app_wait(token, min(int(path.removeprefix(APP_WAIT)[:6]), MOST_WAIT_MS) / 1e3, receive, line)
        else:
            raise NoParcel(404, "no such route")
        await reply(send, 200, Bundle(frames).SerializeToString())

    async def _handled(
        self, work: Callable[..., list[bytes]], *arguments: object, first: bool = False, answers: bool = False
    ) -> list[bytes]:
        """What Flower's handlers answer, in a thread; one at a time, for a database has one who writes. See `Turns`.

        Raises:
            NoParcel: they refuse it. 503 is for whoever comes again; with 409 its own routes say what is wrong.
        """
        from fastapi import HTTPException
        from flwr.supercore.error import FlowerError
        from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

        try:
            async with self._turns.turn(first=first, answers=answers):
                return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)
        except HTTPException as error:
            raise NoParcel(503 if error.status_code == 503 else 409, str(error.detail)) from None
        except (FlowerError, ValueError, DecodeError):
            raise NoParcel(409, "send it by itself") from None

    # Nodes.

    async def _pull(self, node: int, receive: Receive, line: Line | None) -> list[bytes]:
        with self._holding(node, line) as event:
            ends_s = asyncio.get_running_loop().time() + HOLD_S
            left = asyncio.create_task(gone(receive))
            try:
                while True:
                    event.clear()
                    frames = [] if self._left.get(node) == 0 else await self._look(node)
                    wait_s = ends_s - asyncio.get_running_loop().time()
                    if frames or wait_s <= 0 or left.done() or self._held.get(node) is not event:
                        if not frames:  # nothing is known for good: the next request looks
                            self._left.pop(node, None)
                        if not left.done():
                            await self._lives(node)
                        return frames
                    await _first(wait_s, left, event.wait())
            finally:
                left.cancel()

    @contextmanager
    def _holding(self, whom: int, line: Line | None) -> Iterator[asyncio.Event]:
        """Be the one request that waits for whom; one that did hears that there is nothing."""
        event = asyncio.Event()
        before = self._held.get(whom)
        self._held[whom] = event
        if before is not None:
            before.set()
        if line is not None:
            line.held = True
        try:
            yield event
        finally:
            if line is not None:
                line.held = False
            if self._held.get(whom) is event:
                del self._held[whom]

    async def _look(self, node: int) -> list[bytes]:
        """The node's next message, with its parts; and note whether there are more."""
        before = self._stored[node]
        frames = await self._handled(self._take, node)
        if frames:
            if node in self._left:
                self._left[node] = max(0, self._left[node] - 1)
        elif before == self._stored[node]:
            self._left[node] = 0
        else:
            self._left.pop(node, None)
        return frames

    def _take(self, node: int) -> list[bytes]:
        from flwr.proto.fleet_pb2 import PullMessagesRequest
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
        from flwr.proto.node_pb2 import Node
        from flwr.superlink.servicer.fleet import fleet_handlers

        me = Node(node_id=node)
        with one_transaction(self._state(), self._tell_of) as state:
            found = fleet_handlers.pull_messages(PullMessagesRequest(node=me), state, state.object_store)
            if not found.messages_list:
                return []
            run = found.messages_list[0].metadata.run_id

            def ask(name: str) -> PullObjectResponse:
                return fleet_handlers.pull_object(PullObjectRequest(node=me, run_id=run, object_id=name), state)

            def confirm(name: str) -> None:
                told = ConfirmMessageReceivedRequest(node=me, run_id=run, message_object_id=name)
                fleet_handlers.confirm_message_received(told, state, state.object_store)

            frames = _parts(found.message_object_trees, ask, confirm, MOST_BYTES)
            return [found.SerializeToString(), *frames]

    def _beat(self, node: int, body: bytes) -> list[bytes]:
        from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
        from flwr.superlink.servicer.fleet import fleet_handlers

        told = SendNodeHeartbeatRequest.FromString(body)
        if told.node.node_id != node:
            raise NoParcel(401, "another node's")
        return [fleet_handlers.send_node_heartbeat(told, self._state()).SerializeToString()]

    async def _lives(self, node: int) -> None:
        """A look is a heartbeat, when it begins and when it is answered; so is an answer that is taken."""
        if not self._hear(node):
            await self._handled(note_life, self._state(), node, first=self._prompt.goes_first(node))

    def _push(self, node: int, frames: list[bytes]) -> list[bytes]:
        from flwr.proto.fleet_pb2 import PushMessagesRequest
        from flwr.proto.message_pb2 import PushObjectRequest
        from flwr.superlink.servicer.fleet import fleet_handlers

        asked = PushMessagesRequest.FromString(frames[0])
        parts = [PushObjectRequest.FromString(frame) for frame in frames[1:]]
        if any(each.node.node_id != node for each in (asked, *parts)):
            raise NoParcel(403, "another node's")
        with self._together(), self._storing(asked, parts) as state:
            answer = fleet_handlers.push_messages(asked, state)
            return _with_parts(answer, parts, lambda part: fleet_handlers.push_object(part, state).stored)

    def _storing(self, asked: Any, parts: Iterable[Any]) -> AbstractContextManager[Any]:
        """The state that stores what is asked for, with parts that came with it."""
        came = {part.object_id: part.object_content for part in parts}
        return one_transaction(self._state(), self._tell_of, asked.message_object_trees, came)

    # Apps.

    async def _app_wait(self, token: bytes, wait_s: float, receive: Receive, line: Line | None) -> None:
        """Return once an answer is stored that came after the app's last look, or the time is over."""
        run = self._runs.get(token)
        if run is None or self._looks.any(run):
            return
        left = asyncio.create_task(gone(receive))
        try:
            with self._holding(run, line) as event:
                await _first(wait_s, left, event.wait())
        finally:
            left.cancel()

    def _app_pull(self, token: bytes, frames: list[bytes]) -> list[bytes]:
        from flwr.common.constant import SUPERLINK_NODE_ID
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
        from flwr.proto.node_pb2 import Node
        from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse
        from flwr.superlink.servicer.runtime import runtime_handlers

        task, me = self._tasks.of(token), Node(node_id=SUPERLINK_NODE_ID)
        run: int = task.run_id
        self._runs = {token: run, **{key: value for key, value in self._runs.items() if value != run}}
        asked = PullAppMessagesRequest.FromString(frames[0])
        if not self._looks.worth_it(token, run, asked):
            return [PullAppMessagesResponse().SerializeToString()]
        with one_transaction(self._state(), self._tell_of) as state:
            found = runtime_handlers.pull_messages(asked, state, task)

            def ask(name: str) -> PullObjectResponse:
                return runtime_handlers.pull_object(PullObjectRequest(node=me, run_id=run, object_id=name), state, task)

            def confirm(name: str) -> None:
                told = ConfirmMessageReceivedRequest(node=me, run_id=run, message_object_id=name)
                runtime_handlers.confirm_message_received(told, state, task)

            frames = [found.SerializeToString(), *_parts(found.message_object_trees, ask, confirm, MOST_APP_BYTES)]
        self._looks.done(run)
        return frames

    def _app_push(self, token: bytes, frames: list[bytes]) -> list[bytes]:
        from flwr.proto.message_pb2 import PushObjectRequest
        from flwr.proto.runtime_pb2 import PushAppMessagesRequest
        from flwr.superlink.servicer.runtime import runtime_handlers

        task, asked = self._tasks.of(token), PushAppMessagesRequest.FromString(frames[0])
        parts = [PushObjectRequest.FromString(frame) for frame in frames[1:]]
        with self._together(), self._storing(asked, parts) as state:
            answer = runtime_handlers.push_messages(asked, state, task)
            return _with_parts(answer, parts, lambda part: runtime_handlers.push_object(part, state, task).stored)

    def _app_waiting(self, token: bytes, frames: list[bytes]) -> list[bytes]:
        names = still_waiting(self._state(), self._tasks.of(token).run_id, [name.decode() for name in frames])
        return [name.encode() for name in names]


def _with_parts(answer: Any, parts: Iterable[Any], store: Callable[[Any], bool]) -> list[bytes]:
    """Store the parts that came with messages; Flower's answer names those that are still to be pushed."""
    for part in parts:
        if part.object_id in answer.objects_to_push:
            part.session_id = answer.session_id
            if store(part):
                answer.objects_to_push.remove(part.object_id)
    return [answer.SerializeToString()]


async def _first(wait_s: float, left: asyncio.Task[None], told: Awaitable[object]) -> None:
    """Wait for the end of the time, the line or the waiting, whichever comes first."""
    waiting = asyncio.ensure_future(told)
    try:
        await asyncio.wait({left, waiting}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()


def _parts(trees: Iterable[ObjectTree], ask: Ask, confirm: Callable[[str], None], most: int) -> list[bytes]:
    """Parts of messages, as far as they fit; a message that goes whole is confirmed, as its receiver would."""
    from flwr.supercore.error import FlowerError

    frames: list[bytes] = []
    for tree in trees:
        names = parts_of(tree)
        try:
            parts = [ask(name) for name in names]
            size = sum(len(part.object_content) for part in parts)
            whole = size <= most and all(part.object_available for part in parts)
        except FlowerError:  # the run is over: whoever asks for a part hears it
            whole = False
        if names and whole:
            most -= size
            frames += [part.SerializeToString() for part in parts]
            confirm(tree.object_id)
        else:
            frames += [b""] * len(names)
    return frames
