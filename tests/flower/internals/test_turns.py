"""Whose turn it is, where many ask at once."""

import asyncio
from contextlib import AbstractAsyncContextManager

import pytest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest

from fedsync.config.gate import GateConfig
from fedsync.flower.internals import bundle_routes, versions
from fedsync.flower.internals.turns import Turns
from tests.flower.internals.superlink import serving
from tests.flower.internals.test_bundles import ask as order
from tests.flower.internals.test_bundles import look, server_app, supernode


async def ask(turns: Turns, name: str, had: list[str], *, first: bool = False, answers: bool = False) -> None:
    async with turns.turn(first=first, answers=answers):
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


def test_an_answer_waits_for_one_look_at_most_and_no_look_for_all_answers() -> None:
    async def play() -> list[str]:
        turns, had = Turns(), list[str]()
        async with turns.turn():
            asked = [asyncio.create_task(ask(turns, f"look{number}", had)) for number in range(4)]
            asked += [asyncio.create_task(ask(turns, f"answer{number}", had, answers=True)) for number in range(3)]
            await asyncio.sleep(0)
            asked += [asyncio.create_task(ask(turns, "app", had, first=True))]
            await asyncio.sleep(0)
        await asyncio.gather(*asked)
        return begun(had)

    assert asyncio.run(play()) == ["app", "answer0", "look0", "answer1", "look1", "answer2", "look2", "look3"]


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


@pytest.mark.skipif(not versions.supported(), reason="this flwr is not a tested version")
def test_heartbeats_and_what_the_app_asks_for_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    firsts = list[bool]()

    class Noting(Turns):
        def turn(self, *, first: bool = False, answers: bool = False) -> AbstractAsyncContextManager[None]:
            firsts.append(first)
            return super().turn(first=first, answers=answers)

    monkeypatch.setattr(bundle_routes, "Turns", Noting)
    with serving(monkeypatch, GateConfig()) as link:
        berlin, (grid, _) = link.silo(), server_app(link)
        berlin.client.SendNodeHeartbeat(SendNodeHeartbeatRequest(node=berlin.node, heartbeat_interval=30))
        order(link, berlin, grid)
        assert firsts == [True, True]
        look(berlin, supernode(berlin)[0])
        assert firsts == [True, True, True, False, True], "a look is a heartbeat, too, at its begin and its end"
