"""What a relay says to the server that is not so: who is behind it, what it brings, and when. Its own region alone
suffers from it, and that no longer than silos that say nothing."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsync.common.errors import ProtocolError
from fedsync.config.strategy import StrategyConfig
from fedsync.core.orders import SiloFacts
from fedsync.extras.relays import region_clients
from fedsync.extras.relays.region_clients import Regions, RelayedRequest
from fedsync.extras.relays.relay_messages import (
    MAX_SILOS,
    RegionAnswer,
    RegionMembers,
    RegionReply,
    RegionRequest,
    RelayedNode,
    joined,
    read_region_reply,
    read_region_request,
    write,
)
from fedsync.flower.flower_strategy import FedSync
from fedsync.model.layout import Layout
from fedsync.model.transfer import Payload
from fedsync.server.nodes import Admission, Nodes
from fedsync.silo.protocol import Hello, Refusal, Refused, write_reply
from fedsync.transport.port import MOST_TEXT_BYTES, SiloAnswer, SiloQuestion
from tests.flower.grid import silos_in_this_process
from tests.flower.named_nodes import named
from tests.server.test_region_clients import NAMES, QUICK, SILOS, TIMING, committed, grid_of, journal, relays_of

LARGE = 3 * 2**20


class Sums:
    """An aggregator that says which sums it was given, and takes them if it is told to."""

    def __init__(self, *, takes: bool = True) -> None:
        self.takes, self.sums = takes, list[tuple[str, ...]]()

    def put_sum(self, relay: str, update_ids: tuple[str, ...], payload: Payload) -> None:
        if not self.takes:
            raise ProtocolError(relay, "nonce", "that of another update")
        self.sums.append(update_ids)


class Server:
    """Its end of one relay, and what that was sent."""

    def __init__(self, *here: str, takes: bool = True) -> None:
        self.regions = Regions(Layout(("w",), ((2,),)), hold_s=25.0)
        self.sent: list[RegionRequest] = []
        self.sums = Sums(takes=takes)
        self.here = tuple(RelayedNode(node, name, "now") for node, name in enumerate(here, 1))
        self.regions.enrol(9, "north", "now", self.arrival(RegionReply(here=self.here)))

    def arrival(self, reply: RegionReply, answers: int = 0, pieces: Iterable[Payload] = ()) -> SiloAnswer:
        pieces = list(pieces)
        reply = replace(reply, here=reply.here or self.here, pieces=tuple(each.nbytes for each in pieces))
        text, payload = write(reply), joined(pieces)
        if answers and payload is not None and payload.nbytes > self.sent[answers - 1].most:
            # As each transport does.
            return SiloAnswer(f"bundle {answers}", problem=f"{payload.nbytes} bytes", check="length", relay=True)
        return SiloAnswer(f"bundle {answers}", text, payload, relay=True)

    def send(self, questions: Sequence[tuple[int, SiloQuestion]]) -> list[str]:
        for _, question in questions:
            request = read_region_request(question.text)
            assert request is not None and question.most == request.most
            self.sent.append(request)
        return [f"bundle {len(self.sent)}"]

    def push(self, *letters: tuple[int, RelayedRequest]) -> list[str]:
        transport: Any = self
        return [number or "" for number in self.regions.push(transport, "{}", letters)]

    def turn(self, number: int, here: tuple[RelayedNode, ...]) -> None:
        """Ask again, and hear who is there."""
        self.regions._relays[9].quiet_s = 0.0
        self.push()
        self.hears(RegionReply(here=here), number)

    def train(self, *silos: str, most: int = 8, in_sum: int = 0) -> list[str]:
        letters = (RelayedRequest("", None, most, 60.0, f"{silo}/1", 1, in_sum) for silo in silos)
        return self.push(*(("abc".index(letter.update_id[0]) * -1 - 1, letter) for letter in letters))

    def hears(self, reply: RegionReply, answers: int, pieces: Iterable[Payload] = ()) -> list[SiloAnswer]:
        aggregator: Any = self.sums
        wanted = {number for relay in self.regions._relays.values() for number in relay.waiting}
        found = self.regions.unpack(self.arrival(reply, answers, pieces), wanted, aggregator)
        assert found is not None
        return found


def zeros(nbytes: int) -> Payload:
    return np.zeros(nbytes, np.uint8)


def answers(*numbers: str, piece: int = -1) -> tuple[RegionAnswer, ...]:
    return tuple(RegionAnswer(number, "{}", piece) for number in numbers)


# What it brings.


def test_a_relay_may_answer_what_came_before_with_the_sum_of_what_came_after() -> None:
    """There is room for an update of each silo in any answer, once one was asked for."""
    server = Server("a", "b")
    server.push()
    first, second = server.train("a", "b", most=LARGE)
    assert [request.most > 2 * LARGE for request in server.sent] == [False, True]
    sums = (RegionMembers((first, second), ("a/1", "b/1"), 0),)
    assert len(server.hears(RegionReply(answers=answers(first, second), sums=sums), 2, [zeros(LARGE)])) == 2
    server.hears(RegionReply(), 1)
    server.regions._relays[9].quiet_s = 0.0
    server.push()
    assert server.sent[-1].most > 2 * LARGE and not server.sent[-1].asks
    (third,) = server.train("a", most=LARGE)
    (found,) = server.hears(RegionReply(answers=answers(third, piece=0)), 3, [zeros(LARGE)])
    assert found.payload is not None and found.payload.nbytes == LARGE


def test_a_mean_may_be_larger_than_the_updates_that_it_is_of() -> None:
    """As of two that travel as bytes, where it travels as float32."""
    server = Server("a", "b")
    first, second = server.train("a", "b", most=LARGE, in_sum=2 * LARGE)
    sums = (RegionMembers((first, second), ("a/1", "b/1"), 0),)
    server.hears(RegionReply(answers=answers(first, second), sums=sums), 1, [zeros(4 * LARGE)])
    assert server.sums.sums == [("a/1", "b/1")]
    assert [ask.most for ask in server.sent[0].asks] == [LARGE, LARGE], "a silo itself sends no more"


def test_a_relay_that_brings_more_than_its_silos_may_is_not_heard() -> None:
    server = Server("a", "b")
    first, second = server.train("a", "b")
    assert server.hears(RegionReply(answers=answers(first, piece=0)), 1, [zeros(2**21)]) == []
    late = server.arrival(RegionReply(answers=answers(second, piece=0)), 1, [zeros(8)])
    assert server.regions.unpack(late, {second}, None) is None, "that message is over"


def test_nothing_counts_of_an_answer_of_which_a_part_is_none() -> None:
    server = Server("a", "b", "c")
    first, second, third = server.train("a", "b", "c")
    sums = (RegionMembers((first, second), ("a/1", "b/1"), 0),)
    told = (*answers(first, second), *answers(third, piece=7))
    assert server.hears(RegionReply(answers=told, sums=sums), 1, [zeros(8)]) == []
    assert server.sums.sums == []


def test_updates_of_a_sum_that_is_none_are_asked_for_and_come_alone() -> None:
    """Two silos of different regions that seal under one nonce, or one that is given up, cost the others no round."""
    server = Server("a", "b", takes=False)
    first, second = server.train("a", "b")
    sums = (RegionMembers((first, second), ("a/1", "b/1"), 0),)
    found = server.hears(RegionReply(answers=answers(first, second), sums=sums), 1, [zeros(8)])
    assert [(each.again, each.summed, each.problem) for each in found] == [(True, False, "")] * 2
    numbers = server.train("a", "b")
    assert [ask.update_id for ask in server.sent[-1].asks] == ["", ""]
    pieces = [zeros(8), zeros(8)]
    told = tuple(RegionAnswer(number, "{}", piece) for piece, number in enumerate(numbers))
    found = server.hears(RegionReply(answers=told), 2, pieces)
    assert [(each.again, each.summed) for each in found] == [(False, False)] * 2
    assert not server.regions._alone, "nothing of it is kept"


def test_one_relay_answers_nothing_that_another_was_asked() -> None:
    server = Server("a", "b")
    server.regions.enrol(8, "south", "now", server.arrival(RegionReply(here=(RelayedNode(1, "c", "now"),))))
    first, second = server.train("a", "b")
    (other,) = server.push((-3, RelayedRequest("", None, 8, 60.0, "c/1")))
    assert len(server.sent) == 3
    sums = (RegionMembers((first, other), ("a/1", "c/1"), 0),)
    found = server.hears(RegionReply(answers=answers(first, second, other), sums=sums), 1, [zeros(8)])
    assert [(each.name, each.again) for each in found] == [(first, True), (second, False)]
    assert server.sums.sums == []


# Who it says is there, and when.


def test_a_relay_whose_silos_are_others_each_time_fills_no_memory() -> None:
    server = Server("a")
    for turn in range(1, 5):
        here = tuple(RelayedNode(MAX_SILOS * turn + number, "", "now") for number in range(MAX_SILOS))
        server.turn(turn, here)
    assert len(server.regions._behind) == MAX_SILOS


def test_a_relay_that_says_nothing_at_once_is_asked_rarely() -> None:
    server = Server("a")
    end_s = time.monotonic() + 0.35
    while time.monotonic() < end_s:
        before = len(server.sent)
        server.push()
        if len(server.sent) > before:
            server.hears(RegionReply(answers=answers("nobody's")), len(server.sent))
    assert 2 <= len(server.sent) <= 4


def test_a_relay_that_refuses_is_asked_less_and_less_often_and_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    server, pauses = Server("a"), list[int]()
    relay, refusal = server.regions._relays[9], write_reply(Refused(Refusal.CONFIG, "no keys"))
    for number in range(1, 9):
        relay.quiet_s = 0.0
        server.push()
        server.regions.unpack(SiloAnswer(f"bundle {number}", refusal, relay=True), set(), None)
        pauses.append(round(relay.quiet_s - time.monotonic()))
    assert pauses == [1, 2, 4, 8, 16, 32, 64, 64]
    assert caplog.text.count("north answers CONFIG") == 1 and "(no keys)" in caplog.text
    server.turn(9, server.here)
    assert relay.quiet_s - time.monotonic() < 1 and relay.refused == 0


def test_a_relay_is_no_silo() -> None:
    """Its key is that of who speaks for others, and its name is on no list of silos."""
    nodes = Nodes(named({1: "north", 2: "b"}), Admission(registered=True, regions={"north": ["a"]}))
    nodes.look()
    with pytest.raises(ProtocolError, match="'north' is a relay's name"):
        nodes.check(1, Hello("north", SiloFacts(10)))
    assert nodes.check(2, Hello("b", SiloFacts(10))) == "b"


def test_a_silo_behind_a_relay_holds_no_more_samples_than_the_strategy_allows() -> None:
    nodes = Nodes(named({1: "north"}), Admission(regions={"north": ["a"]}, most_examples=1000))
    nodes.look()
    reply = write(RegionReply(here=(RelayedNode(1, "a", "now"),)))
    nodes.relay(1, SiloAnswer("", reply, relay=True))
    assert nodes.look() == ([1], [-1])
    with pytest.raises(ProtocolError, match="holds 1001 training samples"):
        nodes.check(-1, Hello("a", SiloFacts(1001)))


# Runs with a relay that lies from the first order on.


def _run(folder: Path, lie: Any, *overrides: str, **timing: Any) -> Any:
    relays = relays_of()
    honestly = type(relays[0].service).ask

    class Lying(type(relays[0].service)):  # type: ignore[misc]  # its class is known here only
        def ask(self, spec: str, text: str, payload: Payload | None) -> tuple[str, Payload | None]:
            said, answer = honestly(self, spec, text, payload)
            return lie(read_region_reply(said, "north"), answer, said)

    relays[0].service.__class__ = Lying
    config = StrategyConfig.load("fedavg", [*QUICK, *overrides])
    with silos_in_this_process():
        FedSync(config, SILOS, out=folder, timing=replace(TIMING, **timing)).start(grid_of(relays))
    return committed(folder)


@pytest.mark.slow
def test_sums_that_are_held_back_for_ever_cost_their_region_its_rounds_and_nobody_else(tmp_path: Path) -> None:
    def holds(reply: RegionReply, answer: Payload | None, said: str) -> tuple[str, Payload | None]:
        return (write(RegionReply(reply.session, here=reply.here, knows=True)), None) if reply.sums else (said, answer)

    rounds = _run(tmp_path, holds, "stop.rounds=2", order_timeout_s=3, ask_s=60.0)
    assert rounds == [["c", "d", "e"]] * 2
    assert "no answer in 3 s" in journal(tmp_path)


def test_the_sum_of_the_round_before_is_in_no_other(tmp_path: Path) -> None:
    """Each is replayed in the place of the next, under the names that it had."""
    kept = list[tuple[RegionReply, Payload | None]]()

    def replays(reply: RegionReply, answer: Payload | None, said: str) -> tuple[str, Payload | None]:
        if not reply.sums:
            return said, answer
        kept.append((reply, answer))
        if len(kept) == 1:
            return said, answer
        return write(replace(reply, sums=kept[0][0].sums, pieces=kept[0][0].pieces)), kept[0][1]

    rounds = _run(tmp_path, replays, "min_silos=5", ask_s=0.2)
    assert rounds[:2] == [list(NAMES), ["c", "d", "e"]], "what nobody asks for any more is no sum"


# Relays that keep the server busy: silos that come and go without end, and replies that take long to read.


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
        server.turn(turn, here(turn))
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
