"""Answers that come over Flower's grid, none of which waits for another.

Flower announces an answer before its parts are there, and `pull_messages` returns when it has all parts of all
answers. Where one silo's line is slow, or ends in the middle, for which Flower waits three minutes, nobody would be
heard meanwhile. So one request asks what is announced, and each answer is fetched by a thread of its own.

This takes Flower's own `pull_messages` apart, so it serves only the versions in `fedsync.runtime.executor.TESTED`, and
only the grid that has a SuperLink behind it. With any other, one call pulls everything.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from fedsync.runtime import executor
from fedsync.runtime.messages import shortened

MOST_AT_ONCE = 64
"""Answers that are fetched at the same time, each by a few threads."""

_SOON_S = 0.1


@dataclass(frozen=True, slots=True)
class Arrival:
    """What became of a message.

    Args:
        answers: the message's identifier.
        content: its answer; None where there is none to be had.
        problem: why not.
    """

    answers: str
    content: Message | None
    problem: str = ""


class Arrivals:
    """Pulls answers.

    Args:
        grid: of Flower.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid: Any = grid
        self._apart = executor.supported() and _has_superlink(grid)
        self._announced: deque[tuple[str, Any]] = deque()
        self._fetching: dict[str, Future[Message]] = {}

    def pull(self, identifiers: Iterable[str]) -> list[Arrival]:
        """Answers to these messages that are here, and to others that were asked for before.

        Raises:
            httpx.HTTPError: the SuperLink cannot be reached, or the run is over.
        """
        if not self._apart:
            return [_arrival(reply.metadata.reply_to_message_id, reply) for reply in self._pull_all(identifiers)]
        self._look(identifiers)
        begun = self._begin()
        if begun:
            wait(begun, timeout=_SOON_S)
        done = [identifier for identifier, answer in self._fetching.items() if answer.done()]
        return [_fetched(identifier, self._fetching.pop(identifier)) for identifier in done]

    def _pull_all(self, identifiers: Iterable[str]) -> Iterable[Message]:
        wanted = list(identifiers)
        return list(self._grid.pull_messages(wanted)) if wanted else []

    def _look(self, identifiers: Iterable[str]) -> None:
        """Note which answers are announced. The SuperLink does so once, and knows nothing of the message after it."""
        from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse

        known = {identifier for identifier, _ in self._announced} | self._fetching.keys()
        wanted = [identifier for identifier in identifiers if identifier not in known]
        if not wanted:
            return
        found = self._grid._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=wanted))
        for head, tree in zip(found.messages_list, found.message_object_trees, strict=True):
            alone = PullAppMessagesResponse(messages_list=[head], message_object_trees=[tree])
            self._announced.append((head.metadata.reply_to_message_id, alone))

    def _begin(self) -> list[Future[Message]]:
        begun = []
        while self._announced and len(self._fetching) < MOST_AT_ONCE:
            identifier, alone = self._announced.popleft()
            grid = copy.copy(self._grid)
            grid._client = _Announced(self._grid._runtime_client, alone)
            answer: Future[Message] = Future()
            # A daemon: at the end of a run there is nothing more to wait for.
            threading.Thread(target=_fetch, args=(grid, identifier, answer), daemon=True).start()
            self._fetching[identifier] = answer
            begun.append(answer)
        return begun


class _Announced:
    """Flower's client of the SuperLink, to which one answer alone is announced."""

    def __init__(self, client: Any, announced: Any) -> None:
        self._client = client
        self._announced = announced

    def PullMessages(self, request: Any) -> Any:
        return self._announced

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


def _has_superlink(grid: Grid) -> bool:
    from flwr.superlink.grid.http_grid import HttpGrid

    return isinstance(grid, HttpGrid)


def _fetch(grid: Grid, identifier: str, answer: Future[Message]) -> None:
    try:
        (message,) = grid.pull_messages([identifier])
        answer.set_result(message)
    except BaseException as error:
        answer.set_exception(error)


def _fetched(identifier: str, answer: Future[Message]) -> Arrival:
    import httpx

    try:
        return _arrival(identifier, answer.result())
    except (httpx.HTTPError, OSError):
        raise
    except Exception as error:  # what a silo's bytes may do to Flower's reading of them
        return Arrival(identifier, None, f"it cannot be read: {type(error).__name__}: {shortened(str(error))}")


def _arrival(identifier: str, message: Message) -> Arrival:
    if message.has_error():
        return Arrival(identifier, None, f"error {message.error.code}: {shortened(message.error.reason)}")
    return Arrival(identifier, message)
