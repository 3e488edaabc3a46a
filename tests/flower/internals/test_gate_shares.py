"""How much of the server's memory and threads a silo's requests take at a time."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

from fedsync.flower.internals.shares import MOST_AT_ONCE, MOST_OF_ONE_BYTES, NoPlaceError, Shares

MIB = 2**20


def played(scene: Callable[[Shares, AsyncExitStack], Awaitable[None]], most: int = 100 * MIB) -> Shares:
    async def play() -> Shares:
        shares = Shares(most, patience_s=0.05)
        async with AsyncExitStack() as held:
            await scene(shares, held)
        return shares

    shares = asyncio.run(play())
    assert shares.taken == 0
    return shares


def test_a_silo_has_so_many_requests_at_once() -> None:
    async def scene(shares: Shares, held: AsyncExitStack) -> None:
        for _ in range(MOST_AT_ONCE):
            await held.enter_async_context(shares.share(7, 1))
        with pytest.raises(NoPlaceError):
            await held.enter_async_context(shares.share(7, 1))
        await held.enter_async_context(shares.share(8, 1))

    played(scene)


def test_a_silo_has_so_many_bytes() -> None:
    async def scene(shares: Shares, held: AsyncExitStack) -> None:
        await held.enter_async_context(shares.share(7, MOST_OF_ONE_BYTES - 5))
        await held.enter_async_context(shares.share(7, 5))
        with pytest.raises(NoPlaceError):
            await held.enter_async_context(shares.share(7, 1))

    played(scene)


def test_all_together_have_so_many_bytes_and_each_has_one_request() -> None:
    async def scene(shares: Shares, held: AsyncExitStack) -> None:
        for silo in range(5):
            await held.enter_async_context(shares.share(silo, 16 * MIB))
        assert shares.taken == 80 * MIB, "more than is there"
        with pytest.raises(NoPlaceError):
            await held.enter_async_context(shares.share(3, 1))

    played(scene, most=40 * MIB)


def test_what_waits_goes_on_when_there_is_room() -> None:
    async def scene(shares: Shares, held: AsyncExitStack) -> None:
        one = shares.share(7, MOST_OF_ONE_BYTES)
        await one.__aenter__()
        other = asyncio.create_task(held.enter_async_context(shares.share(7, 5)))
        await asyncio.sleep(0.01)
        assert not other.done()
        await one.__aexit__(None, None, None)
        await other

    played(scene)
