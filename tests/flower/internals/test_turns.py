"""Whose turn it is, where many ask at once."""

import asyncio

from fedsync.flower.internals.turns import Turns


async def ask(turns: Turns, name: str, had: list[str], *, first: bool = False) -> None:
    async with turns.turn(first=first):
        had.append(f"{name} begins")
        await asyncio.sleep(0)
        had.append(f"{name} ends")


def begun(had: list[str]) -> list[str]:
    """Who had a turn, after a look that nobody else had one meanwhile."""
    names = [word.split()[0] for word in had]
    assert names[::2] == names[1::2]
    return names[::2]


def test_the_app_goes_before_nodes_that_asked_sooner() -> None:
    async def play() -> list[str]:
        turns, had = Turns(), list[str]()
        async with turns.turn():
            asked = [asyncio.create_task(ask(turns, name, had)) for name in ("berlin", "paris")]
            asked += [asyncio.create_task(ask(turns, name, had, first=True)) for name in ("pull", "push")]
            await asyncio.sleep(0)  # all of them wait
        await asyncio.gather(*asked)
        await ask(turns, "later", had)
        return begun(had)

    assert asyncio.run(play()) == ["pull", "push", "berlin", "paris", "later"]


def test_whoever_goes_away_keeps_nobody_waiting() -> None:
    async def play(rounds: int) -> list[str]:
        turns, had = Turns(), list[str]()
        berlin, paris, rome = (asyncio.create_task(ask(turns, name, had)) for name in ("berlin", "paris", "rome"))
        while len(had) < rounds:
            await asyncio.sleep(0)
        paris.cancel()  # while it waits, and when it was just given the turn
        await asyncio.wait_for(asyncio.gather(berlin, rome), 5)
        return begun(had)

    assert asyncio.run(play(1)) == asyncio.run(play(2)) == ["berlin", "rome"]


def test_a_turn_that_fails_is_over() -> None:
    async def play() -> list[str]:
        turns, had = Turns(), list[str]()
        try:
            async with turns.turn():
                raise ValueError
        except ValueError:
            await asyncio.wait_for(ask(turns, "berlin", had), 5)
        return begun(had)

    assert asyncio.run(play()) == ["berlin"]
