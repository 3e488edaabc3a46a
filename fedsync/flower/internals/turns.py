"""One at a time, the app before nodes, and nodes' answers not behind all that look for orders.

A run has one app, which asks for many messages at once and goes on when it has its answer. Among the requests of a
thousand nodes it would wait for all of them, and they for it. An answer that waited for a thousand nodes to fetch their
orders would look like one that is lost. So as long as there are both, every other turn is an answer's: no node that
sends many keeps others from their orders.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """Turns of an event loop's tasks, in the order in which they ask, but for those that go first, and answers."""

    def __init__(self) -> None:
        self._taken = False
        self._first, self._answers, self._others = (deque[asyncio.Future[None]]() for _ in range(3))
        self._answered = False

    @asynccontextmanager
    async def turn(self, *, first: bool = False, answers: bool = False) -> AsyncIterator[None]:
        """Wait for a turn, and have it: ``first``, or every other one as long as there are ``answers``."""
        if self._taken:
            mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            (self._first if first else self._answers if answers else self._others).append(mine)
            try:
                await mine
            except asyncio.CancelledError:
                if mine.done() and not mine.cancelled():  # it was given the turn just then
                    self._pass_on()
                raise
        self._taken = True
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        """Give the turn to who is next; who went away is not asked."""
        nodes = (self._others, self._answers) if self._answered else (self._answers, self._others)
        for waiting in (self._first, *nodes):
            while waiting:
                mine = waiting.popleft()
                if not mine.done():
                    self._answered = waiting is self._answers
                    mine.set_result(None)
                    return
        self._taken = False
