"""One at a time, the app before nodes, and nodes' answers not behind all that look for orders.

A run has one app, which asks for many messages at once and goes on when it has its answer. Among the requests of a
thousand nodes it would wait for all of them, and they for it. So it goes first, and so do heartbeats. But several apps,
one that asks without end, or a node that sends nothing but heartbeats would leave nobody else a turn. An answer that
waited for a thousand nodes to fetch their orders would look like one that is lost. So:

| as long as there waits | it has |
|---|---|
| who goes first | all turns but one of `MOST_FIRST` + 1 |
| an answer | every other one of those that are left |
| any other node | the rest |

So the answer that waits longest has its turn after 2 (`MOST_FIRST` + 1) others at most, whatever anybody sends.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

MOST_FIRST = 4
"""Turns in a row of those that go first, as long as others wait."""


class Turns:
    """Turns of an event loop's tasks; of each kind in the order in which they ask."""

    def __init__(self) -> None:
        self._taken = False
        self._first, self._answers, self._others = (deque[asyncio.Future[None]]() for _ in range(3))
        self._answered = False
        self._in_a_row = 0

    @asynccontextmanager
    async def turn(self, *, first: bool = False, answers: bool = False) -> AsyncIterator[None]:
        """Wait for a turn, and have it; for the table above, as who goes ``first``, or one of the ``answers``."""
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
        kinds = (self._first, *nodes) if self._in_a_row < MOST_FIRST else (*nodes, self._first)
        for waiting in kinds:
            while waiting:
                mine = waiting.popleft()
                if not mine.done():
                    self._had(waiting)
                    mine.set_result(None)
                    return
        self._taken = False
        self._in_a_row = 0

    def _had(self, waiting: deque[asyncio.Future[None]]) -> None:
        """Note which kind has the turn."""
        if waiting is self._first:
            self._in_a_row += 1
        else:
            self._in_a_row = 0
            self._answered = waiting is self._answers
