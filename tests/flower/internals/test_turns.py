"""Whose turn it is, where many ask at once."""

import asyncio
from contextlib import AbstractAsyncContextManager

import pytest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest

from fedsync.config.gate import GateConfig
from fedsync.flower.internals import bundle_routes, heartbeats, versions
from fedsync.flower.internals.turns import MOST_FIRST, Turns
from tests.flower.internals.bundling import ask as order
from tests.flower.internals.bundling import look, server_app, supernode
from tests.flower.internals.superlink import Silo, serving

needs_tested = pytest.mark.skipif(not versions.supported(), reason="this flwr is not a tested version")


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


async def ask_without_end(turns: Turns, had: list[str]) -> None:
    """Two requests at a time, so that one always waits, as of an app that pulls while it pushes, or of two apps."""

    async def go_on() -> None:
        while True:
            await ask(turns, "app", had, first=True)

    await asyncio.gather(go_on(), go_on())


def test_an_app_that_asks_without_end_leaves_every_fifth_turn_to_nodes() -> None:
    async def play() -> list[str]:
        turns, had = Turns(), list[str]()
        app = asyncio.create_task(ask_without_end(turns, had))
        await asyncio.sleep(0)
        asked = [asyncio.create_task(ask(turns, f"look{number}", had)) for number in range(3)]
        asked += [asyncio.create_task(ask(turns, f"answer{number}", had, answers=True)) for number in range(2)]
        await asyncio.wait_for(asyncio.gather(*asked), 5)
        app.cancel()
        await asyncio.wait({app})
        return begun(had[: len(had) // 2 * 2])  # the last one was cut off

    names = asyncio.run(play())
    others = [(place, name) for place, name in enumerate(names) if name != "app"]
    assert [name for _, name in others] == ["answer0", "look0", "answer1", "look1", "look2"]
    places = [place for place, _ in others]
    # The app has the first turn, which it did not wait for, then MOST_FIRST of each five.
    assert places == [5 + (MOST_FIRST + 1) * number for number in range(5)]


def test_an_answer_has_its_turn_although_all_others_ask_without_end() -> None:
    async def play() -> list[str]:
        turns, had = Turns(), list[str]()

        async def look() -> None:
            while True:
                await ask(turns, "look", had)

        crowd = [asyncio.create_task(ask_without_end(turns, had)), *(asyncio.create_task(look()) for _ in range(9))]
        while had.count("look ends") < 3:
            await asyncio.sleep(0)
        before = len(begun(had[: len(had) // 2 * 2]))
        await asyncio.wait_for(ask(turns, "answer", had, answers=True), 5)
        for each in crowd:
            each.cancel()
        await asyncio.wait(crowd)
        return begun(had[: len(had) // 2 * 2])[before:]

    assert asyncio.run(play()).index("answer") <= 2 * (MOST_FIRST + 1)


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


@pytest.fixture
def firsts(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each turn at a gate, whether it was asked for as one that goes first; all happens within `PROMPT_S`."""
    noted = list[bool]()

    class Noting(Turns):
        def turn(self, *, first: bool = False, answers: bool = False) -> AbstractAsyncContextManager[None]:
            noted.append(first)
            return super().turn(first=first, answers=answers)

    monkeypatch.setattr(bundle_routes, "Turns", Noting)
    monkeypatch.setattr(heartbeats, "PROMPT_S", 1e9)
    return noted


def beat(silo: Silo, interval: float = 30) -> None:
    silo.client.SendNodeHeartbeat(SendNodeHeartbeatRequest(node=silo.node, heartbeat_interval=interval))


@needs_tested
def test_heartbeats_and_what_the_app_asks_for_go_first(monkeypatch: pytest.MonkeyPatch, firsts: list[bool]) -> None:
    with serving(monkeypatch, GateConfig()) as link:
        berlin, paris, (grid, _) = link.silo(), link.silo("paris"), server_app(link)
        beat(berlin)
        order(link, paris, grid)
        assert firsts == [True, True]
        look(paris, supernode(paris)[0])
        assert firsts == [True, True, True, False, False], "a look is a heartbeat, too, at its begin and its end"


@needs_tested
def test_a_node_that_sends_heartbeats_without_end_waits_with_them_as_with_any_request(
    monkeypatch: pytest.MonkeyPatch, firsts: list[bool]
) -> None:
    """Each has another interval, so that it has to be written: a silo that lies took four turns of five from others."""
    with serving(monkeypatch, GateConfig()) as link:
        for interval in range(30, 34):
            beat(link.silo("berlin"), interval)
        beat(link.silo("paris"))
    assert firsts == [True, False, False, False, True]


def test_a_heartbeat_goes_first_again_after_a_while() -> None:
    clock = [0.0]
    prompt = heartbeats.Prompt(lambda: clock[0])

    def said(now_s: float, node: int) -> bool:
        clock[0] = now_s
        return prompt.goes_first(node)

    assert [said(0.0, 1), said(0.5, 2), said(0.9, 1), said(1.0, 1)] == [True, True, False, True]
    assert [said(1.4, 2), said(1.5, 2), said(1.9, 1), said(2.0, 1)] == [False, True, False, True]
    assert said(9.0, 3) and len(prompt._went) == 1, "nobody is remembered for longer"
