"""Answers that come over Flower's grid, none of which waits for another.

Flower announces an answer before its parts are there, and `pull_messages` returns when it has all parts of all
answers. Where one silo's line is slow, or ends in the middle, for which Flower waits three minutes, nobody would be
heard meanwhile. So one request asks what is announced, and each answer is fetched by a thread of its own.

How large an answer is, Flower looks at nowhere. So what comes is counted while it comes, and an answer that is more
than it may be is its silo's problem before it fills this machine's memory.

This takes Flower's own `pull_messages` apart, so it serves only the versions in
`fedsync.flower.internals.versions.TESTED`, and only the grid that has a SuperLink behind it. With any other, one call
pulls everything, and only what is made of an answer is checked.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from flwr.app import Array, Message
from flwr.serverapp import Grid

from fedsync.flower.internals import versions
from fedsync.flower.internals.bundle_client import BundlingClient
from fedsync.flower.internals.bundles import parts_of
from fedsync.flower.messages import shortened

MOST_AT_ONCE = 64
"""Answers that are fetched at the same time, each by a few threads."""

SMALLEST_PART = 2**14
"""Flower cuts arrays into parts of 5 MiB; so many bytes a part on average are asked of an answer that has many."""

FEW_PARTS = 64
"""Parts that any answer may have, however small they are."""

BESIDE = 2**21
"""Bytes that any answer may have beside the data of arrays: texts, a greeting, a small update."""

_NAMED = 512
"""Bytes that name a part, in itself and in what it is a part of."""

_DATA = "ArrayChunk"
_SOON_S = 0.1


@dataclass(frozen=True, slots=True)
class Arrival:
    """What became of a message.

    Args:
        answers: the message's identifier.
        content: its answer; None where there is none to be had.
        problem: why not.
        code: of Flower's error, where the answer is one.
    """

    answers: str
    content: Message | None
    problem: str = ""
    code: int | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class _Announced:
    """An answer whose parts may still be on their way: its head, the tree of its parts, and its most bytes."""

    head: Any
    tree: Any
    most: int

    @property
    def answers(self) -> str:
        """Identifier of the message that it answers."""
        return str(self.head.metadata.reply_to_message_id)


class _Refused(Exception):
    """An answer is not taken; says why."""


class Arrivals:
    """Pulls answers.

    Args:
        grid: of Flower.
        at_once: answers that are fetched at the same time. Each takes up to four times the bytes that it may have.
    """

    def __init__(self, grid: Grid, at_once: int = MOST_AT_ONCE) -> None:
        self._grid: Any = grid
        self._at_once = at_once
        self._apart = versions.supported() and _has_superlink(grid)
        self._announced: deque[_Announced] = deque()
        self._fetching: dict[str, Future[Message]] = {}

    def pull(self, most: Mapping[str, int]) -> list[Arrival]:
        """Answers that are here, also to others that were asked for before.

        Args:
            most: by message, how many bytes its answer may have.

        Raises:
            httpx.HTTPError: the SuperLink cannot be reached, or the run is over.
        """
        if not self._apart:
            return [_arrival(reply.metadata.reply_to_message_id, reply) for reply in self._pull_all(most)]
        self._look(most)
        begun = self._begin()
        if begun:
            wait(begun, timeout=_SOON_S)
        done = [identifier for identifier, answer in self._fetching.items() if answer.done()]
        return [_fetched(identifier, self._fetching.pop(identifier)) for identifier in done]

    def wait(self, seconds: float) -> None:
        """Wait for answers, so long at most."""
        client = self._grid._client if self._apart else None
        if isinstance(client, BundlingClient):
            client.wait(seconds)
        else:
            time.sleep(seconds)

    def waiting(self, identifiers: Sequence[str]) -> set[str]:
        """Messages that still wait at the SuperLink, or whose answer does; none where it cannot say so."""
        client = self._grid._client if self._apart else None
        return client.waiting(identifiers) if isinstance(client, BundlingClient) else set()

    def _pull_all(self, identifiers: Collection[str]) -> list[Message]:
        return list(self._grid.pull_messages(list(identifiers))) if identifiers else []

    def _look(self, most: Mapping[str, int]) -> None:
        """Note which answers are announced. The SuperLink does so once, and knows nothing of the message after it."""
        from flwr.proto.runtime_pb2 import PullAppMessagesRequest

        known = {announced.answers for announced in self._announced} | self._fetching.keys()
        wanted = [identifier for identifier in most if identifier not in known]
        if not wanted:
            return
        found = self._grid._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=wanted))
        for head, tree in zip(found.messages_list, found.message_object_trees, strict=True):
            self._announced.append(_Announced(head, tree, most.get(head.metadata.reply_to_message_id, 0)))

    def _begin(self) -> list[Future[Message]]:
        begun = []
        while self._announced and len(self._fetching) < self._at_once:
            announced = self._announced.popleft()
            answer: Future[Message] = Future()
            if _is_here(self._grid, announced):
                _fetch(self._grid, announced, answer)
            else:
                # A daemon: at the end of a run there is nothing more to wait for.
                threading.Thread(target=_fetch, args=(self._grid, announced, answer), daemon=True).start()
            self._fetching[announced.answers] = answer
            begun.append(answer)
        return begun


class _Counted:
    """Flower's way to ask for a part, for so many bytes in all. Several threads ask at the same time."""

    def __init__(self, ask: Any, most: int) -> None:
        self._ask = ask
        self._most = most
        self._came = 0
        self._lock = threading.Lock()

    def __call__(self, request: Any) -> Any:
        part = self._ask(request)
        with self._lock:
            self._came += len(part.object_content)
            if self._came > self._most:
                raise _Refused(f"it has more than {self._most} bytes")
        return part


def _has_superlink(grid: Grid) -> bool:
    from flwr.superlink.grid.http_grid import HttpGrid

    return isinstance(grid, HttpGrid)


def _fetch(grid: Any, announced: _Announced, answer: Future[Message]) -> None:
    try:
        answer.set_result(_pulled(grid, announced))
    except BaseException as error:
        answer.set_exception(error)


def _is_here(grid: Any, announced: _Announced) -> bool:
    """Whether all parts of an answer came with the look that found it: nobody is to be waited for."""
    client, root = grid._runtime_client, announced.head.metadata.message_id
    return isinstance(client, BundlingClient) and client.came_whole(root, len(parts_of(announced.tree)))


def _pulled(grid: Any, announced: _Announced) -> Message:
    """All parts of an answer, put together."""
    import httpx
    from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
    from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects

    client, run, root = grid._runtime_client, grid.run.run_id, announced.head.metadata.message_id

    def forget() -> None:
        """The SuperLink keeps an answer until it is told not to."""
        client.ConfirmMessageReceived(ConfirmMessageReceivedRequest(node=grid.node, run_id=run, message_object_id=root))

    counted = _Counted(client.PullObject, announced.most)
    try:
        ask, names = make_pull_object_fn_protobuf(counted, grid.node, run), _parts(announced)
        # Flower has a thread for each part, which costs more than to take one that is here.
        contents = {name: ask(name) for name in names} if _is_here(grid, announced) else pull_objects(names, ask)
        _check_parts(contents, announced.most)
    except (httpx.HTTPError, OSError):
        raise
    except Exception:
        forget()
        raise
    forget()
    message = inflate_object_from_contents(root, contents)
    if not isinstance(message, Message):
        raise _Refused(f"it is no message but a {type(message).__name__}")
    return message


def _parts(announced: _Announced) -> list[str]:
    """Identifiers of the parts, before any is asked for."""
    from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

    most = FEW_PARTS + announced.most // SMALLEST_PART
    parts = [part.object_id for part in islice(iterate_object_tree(announced.tree), most + 1)]
    if len(parts) > most:
        raise _Refused(f"it has more than {most} parts")
    return parts


def _check_parts(contents: Mapping[str, bytes], most: int) -> None:
    """Refuse what would become far larger by being put together.

    Arrays say which parts they are made of, and may say so many times of one part. Values beside arrays become Python
    objects, each of which is larger than its bytes.
    """
    from flwr.supercore.inflatable.inflatable_object import get_object_body, get_object_head_values_from_object_content

    heads = {part: get_object_head_values_from_object_content(content) for part, content in contents.items()}
    beside, arrays = 0, 0
    for part, (kind, children, _) in heads.items():
        if kind == _DATA:
            continue
        content = contents[part]
        beside += len(content)
        if beside > BESIDE + _NAMED * len(contents):
            raise _Refused(f"it has {beside} bytes beside arrays")
        if kind == Array.__name__:
            # An array of arrays would repeat what they repeat.
            if any(heads[child][0] != _DATA for child in children):
                raise _Refused("an array in it is not made of data")
            numbers = json.loads(get_object_body(content, Array))["arraychunk_ids"]
            arrays += sum(len(contents[children[number]]) for number in numbers)
            if arrays > most:
                raise _Refused(f"its arrays have more than {most} bytes")


def _fetched(identifier: str, answer: Future[Message]) -> Arrival:
    import httpx
    from flwr.supercore.inflatable.inflatable_utils import ObjectPullError

    try:
        return _arrival(identifier, answer.result())
    except (httpx.HTTPError, OSError):
        raise
    except _Refused as error:
        return Arrival(identifier, None, str(error))
    except ObjectPullError as error:
        return Arrival(identifier, None, f"not all of it came: {shortened(str(error))}")
    except Exception as error:  # what a silo's bytes may do to Flower's reading of them
        return Arrival(identifier, None, f"it cannot be read: {type(error).__name__}: {shortened(str(error))}")


def _arrival(identifier: str, message: Message) -> Arrival:
    if message.has_error():
        code = message.error.code
        return Arrival(identifier, None, f"error {code}: {shortened(message.error.reason)}", code=code)
    return Arrival(identifier, message)
