"""A relay that keeps the server busy: silos that come and go without end, and replies that take long to read."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedsync.extras.relays import region_clients
from fedsync.extras.relays.relay_messages import MAX_SILOS, RegionReply, RelayedNode, write
from fedsync.model.transfer import Payload
from fedsync.transport.questions import MOST_TEXT_BYTES, SiloAnswer
from tests.attacks.test_lying_relay_messages import Server, _run
from tests.server.test_region_clients import NAMES


@pytest.mark.slow
def test_silos_that_come_back_with_each_reply_fill_no_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each return was two entries: 25 kB a second and silo."""
    monkeypatch.setattr(region_clients, "_RETURNS_S", 6.0)
    lies = list[float]()

    def flaps(reply: RegionReply, answer: Payload | None, said: str) -> tuple[str, Payload | None]:
        lies.append(time.monotonic())
        if lies[-1] - lies[0] > 5.0:
            return said, answer
        return write(replace(reply, here=tuple(replace(each, since=str(time.time())) for each in reply.here))), answer

    rounds = _run(tmp_path, flaps, "stop.rounds=2", order_timeout_s=3, ask_s=1.0)
    assert rounds == [list(NAMES)] * 2, "the region is back"
    assert (tmp_path / "journal.jsonl").read_text().count("SiloJoined") < 20


def returns(server: Server, turns: int, here: Any) -> int:
    """Number of arrivals of silos that the server sees while a relay names them anew with each reply."""
    seen, found = set[tuple[int, str]](), 0
    for turn in range(1, turns + 1):
        server.regions._relays[9].quiet_s = 0.0
        server.push()
        server.hears(RegionReply(here=here(turn)), turn)
        relay = server.regions._relays[9]
        now = {(relay.numbers[number], each.since) for number, each in relay.here.items()}
        found += len(now - seen)
        seen = now
    return found


def test_new_numbers_and_absences_are_returns_too() -> None:
    server = Server("a")
    assert returns(server, 50, lambda turn: (RelayedNode(1000 + turn, "a", "now"),)) <= 3
    server = Server("a", "b")
    assert returns(server, 50, lambda turn: server.here[: 1 + turn % 2]) <= 6
    server = Server("a")
    many = returns(server, 8, lambda turn: tuple(RelayedNode(turn * 2000 + n, "", "now") for n in range(MAX_SILOS)))
    assert many <= 5 * MAX_SILOS


@pytest.mark.slow
def test_replies_that_take_long_to_read_are_read_seldom() -> None:
    """A reply of 2 million pieces takes a second; another could come a tenth of a second later."""
    server, readings = Server("a"), 0
    said = f'{{"session":"","pieces":[{",".join("0" * (MOST_TEXT_BYTES // 2 - 50))}]}}'
    begun_s = time.monotonic()
    while time.monotonic() < begun_s + 6.0:
        before = len(server.sent)
        server.push()
        if len(server.sent) > before:
            server.regions.unpack(SiloAnswer(f"bundle {len(server.sent)}", said, None, relay=True), set(), None)
            readings += 1
        time.sleep(0.01)
    assert readings == 1
