"""How much of the server's memory and threads the requests of each silo may take at a time.

A request counts with all its bytes from before its body is read until it is answered. What does not fit waits, unread,
and is told to come again if that takes too long. One request of each silo always fits: others cannot starve it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

MOST_OF_ONE_BYTES = 2**26
"""Bytes of one silo's requests."""

MOST_AT_ONCE = 6
"""One silo's requests; its SuperNode sends two parts of a message at a time, looks for messages, and says it lives."""

PATIENCE_S = 20.0


class NoPlaceError(Exception):
    """A request found no place in time."""


class Shares:
    """The requests that are read or worked on.

    Args:
        most: bytes of them in all, beside one for each silo.
        patience_s: how long a request waits for its place [s].
    """

    def __init__(self, most: int, patience_s: float = PATIENCE_S) -> None:
        self._most = most
        self._patience_s = patience_s
        self._bytes: Counter[int] = Counter()
        self._requests: Counter[int] = Counter()
        self._total = 0
        self._changed = asyncio.Condition()

    @property
    def taken(self) -> int:
        """Bytes in all."""
        return self._total

    @asynccontextmanager
    async def share(self, owner: int, size: int) -> AsyncIterator[None]:
        """Have a place for a request of so many bytes.

        Raises:
            NoPlaceError: there was none in time.
        """
        async with self._changed:
            try:
                async with asyncio.timeout(self._patience_s):
                    await self._changed.wait_for(lambda: self._fits(owner, size))
            except TimeoutError:
                raise NoPlaceError from None
            self._bytes[owner] += size
            self._total += size
            self._requests[owner] += 1
        try:
            yield
        finally:
            self._bytes[owner] -= size
            self._requests[owner] -= 1
            self._total -= size
            if not self._requests[owner]:  # no entry is left of it, and the others are not looked at
                del self._bytes[owner], self._requests[owner]
            async with self._changed:
                self._changed.notify_all()

    def _fits(self, owner: int, size: int) -> bool:
        if not self._requests[owner]:
            return True
        mine = self._bytes[owner] + size
        return self._requests[owner] < MOST_AT_ONCE and mine <= MOST_OF_ONE_BYTES and self.taken + size <= self._most
