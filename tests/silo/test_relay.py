"""A relay between a server and silos that tests play: when it answers, what it adds, and what it forgets."""

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from fedsync.common.errors import ConfigError, LimitReached, ProtocolError
from fedsync.config.run_spec import RunSpec
from fedsync.config.strategy import StrategyConfig
from fedsync.core.orders import WorkOrder, WorkReport
from fedsync.extras.relays.relay import LINGER, RelayService
from fedsync.extras.relays.relay_messages import (
    RegionAsk,
    RegionReply,
    RegionRequest,
    RelayedNode,
    joined,
    parted,
    piece_of,
    read_region_reply,
    read_region_request,
    write,
)
from fedsync.model.layout import Layout
from fedsync.model.transfer import Payload
from fedsync.silo.protocol import Describe, InProgress, Request, Train, write_reply, write_request
from fedsync.transport.port import SiloAnswer

SPEC = RunSpec.of(StrategyConfig.load("fedavg", ["task={kind: digits}"]), None, 3).dump()
LAYOUT = Layout(("w",), ((2,),))


@dataclass
class Silos:
    """Two silos, 1 and 2, that answer when a test says so."""

    here: list[RelayedNode] = field(default_factory=lambda: [RelayedNode(1, "a", "t"), RelayedNode(2, "b", "t")])
    sent: list[tuple[int, Request, Payload | None]] = field(default_factory=list)
    came: list[SiloAnswer] = field(default_factory=list)
    now_s: float = 0.0

    def nodes(self) -> Sequence[RelayedNode]:
        return self.here

    def send(self, node: int, spec: str, asked: Request, payload: Payload | None, ask: RegionAsk) -> str | None:
        if node not in [each.node for each in self.here]:
            return None
        self.sent.append((node, asked, payload))
        return f"m{len(self.sent)}"

    def forget(self, waited: Collection[str]) -> None: ...

    def arrived(self, most: Mapping[str, int]) -> Sequence[SiloAnswer]:
        came, self.came = [each for each in self.came if each.name in most], []
        return came

    def answers(self, message: int, values: list[float], steps: int = 5, samples: int = 40) -> None:
        report = WorkReport(0, steps, samples, 1.0, 1.0)
        self.came.append(SiloAnswer(f"m{message}", write_reply(report), np.array(values, np.float32).view(np.uint8)))


def order(silo: str, number: int = 1) -> WorkOrder:
    return WorkOrder(f"{silo}/{number}", 0, number, 8, 5, 0.1, seed=1)


def train(silo: str, number: int = 1, examples: int = 1) -> RegionAsk:
    node, text = " ab".index(silo), write_request(Train(order(silo, number)))
    return RegionAsk(f"s/{silo}{number}", node, text, most=8, update_id=f"{silo}/{number}", examples=examples)


def request(*asks: RegionAsk, session: str = "s", hold_s: float = 0.0) -> RegionRequest:
    return RegionRequest(session, asks, (), hold_s, LAYOUT)


@pytest.fixture
def silos() -> Silos:
    return Silos()


@pytest.fixture
def relay(silos: Silos) -> RelayService:
    found = RelayService(silos, clock=lambda: silos.now_s)
    found.turn()
    ask(found, request())
    return found


def ask(relay: RelayService, asked: RegionRequest, payload: Payload | None = None) -> tuple[RegionReply, list[Payload]]:
    said, answer = relay.ask(SPEC, write(asked), payload)
    reply = read_region_reply(said, "relay")
    return reply, parted(answer, reply.pieces, "relay")


Told = dict[str, RegionReply]


def hold(relay: RelayService, told: Told, name: str, asked: RegionRequest) -> threading.Thread:
    """Ask in a thread, which goes on until it is told something."""
    thread = threading.Thread(target=lambda: told.update({name: ask(relay, asked)[0]}))
    thread.start()
    thread.join(0.2)
    return thread


def test_updates_of_a_region_are_one_sum(relay: RelayService, silos: Silos) -> None:
    """By examples 1 and 3: (8 + 3 x 4) / 4 = 5 and (0 + 3 x 8) / 4 = 6."""
    ask(relay, request(train("a", examples=1), train("b", examples=3)))
    silos.answers(1, [8, 0])
    silos.answers(2, [4, 8])
    relay.turn()
    reply, pieces = ask(relay, request())
    (members,) = reply.sums
    assert (members.numbers, members.update_ids, members.piece) == (("s/a1", "s/b1"), ("a/1", "b/1"), 0)
    assert [(each.number, each.piece) for each in reply.answers] == [("s/a1", -1), ("s/b1", -1)]
    np.testing.assert_array_equal(pieces[0].view(np.float32), [5, 6])
    assert reply.knows and ask(relay, request())[0].answers == ()


def test_one_update_goes_as_it_came_and_so_does_what_may_not_be_added(relay: RelayService, silos: Silos) -> None:
    alone = replace(train("b"), update_id="")
    ask(relay, request(train("a"), alone))
    silos.answers(1, [1, 2])
    silos.answers(2, [3, 4])
    relay.turn()
    reply, pieces = ask(relay, request())
    assert reply.sums == () and sorted(each.piece for each in reply.answers) == [0, 1]
    found = {each.number: pieces[each.piece].view(np.float32).tolist() for each in reply.answers}
    assert found == {"s/a1": [1, 2], "s/b1": [3, 4]}


def test_payloads_go_to_whom_they_are_for(relay: RelayService, silos: Silos) -> None:
    pieces = [np.arange(3, dtype=np.uint8), np.arange(5, dtype=np.uint8)]
    asks = (replace(train("a"), piece=1), replace(train("b"), piece=0), RegionAsk("s/x", 1, write_request(Describe())))
    ask(relay, replace(request(*asks), pieces=(3, 5)), joined(pieces))
    sent = [None if payload is None else payload.tolist() for _, _, payload in silos.sent]
    assert sent == [[0, 1, 2, 3, 4], [0, 1, 2], None]


def test_pieces_are_what_they_were() -> None:
    for lengths in ((), (4,), (3, 8, 1), (0, 5)):
        pieces = [np.arange(length, dtype=np.uint8) for length in lengths]
        assert [piece.tolist() for piece in parted(joined(pieces), lengths, "x")] == [p.tolist() for p in pieces]
    whole = joined([np.arange(3, dtype=np.uint8), np.arange(5, dtype=np.uint8)])
    for wrong in ((3,), (3, 6), (3, 4), (16, -3), ()):
        with pytest.raises(ProtocolError, match="length"):
            parted(whole, wrong, "x")
    for number in (-2, 1):
        with pytest.raises(ProtocolError, match="speaks of number"):
            piece_of([np.zeros(1, np.uint8)], number, "x")


def test_a_first_answer_waits_for_others_a_tenth_of_what_it_took(relay: RelayService, silos: Silos) -> None:
    ask(relay, request(train("a"), train("b")))
    silos.now_s = 10.0
    silos.answers(1, [1, 2])
    relay.turn()
    told: Told = {}
    silos.now_s = 10.0 + 10.0 * LINGER - 0.01
    thread = hold(relay, told, "it", request(hold_s=100.0))
    assert thread.is_alive()
    silos.now_s = 10.0 + 10.0 * LINGER
    thread.join(10.0)
    assert [each.number for each in told["it"].answers] == ["s/a1"]


@pytest.mark.parametrize("event", ["answer", "silo", "time", "session"])
def test_the_oldest_request_is_answered_when_there_is_news(event: str, relay: RelayService, silos: Silos) -> None:
    ask(relay, request(train("a")))
    told: Told = {}
    first, second = (hold(relay, told, name, request(hold_s=100.0)) for name in ("first", "second"))
    assert first.is_alive() and second.is_alive()
    match event:
        case "answer":
            silos.answers(1, [1, 2])
        case "silo":
            silos.here = silos.here[:1]
        case "time":
            silos.now_s = 100.0
        case "session":
            ask(relay, request(session="t"))
    relay.turn()
    first.join(10.0)
    assert "first" in told
    if event in ("answer", "silo"):
        assert second.is_alive() and len(told["first"].here) == (2 if event == "answer" else 1)
        silos.now_s = 200.0
    second.join(10.0)
    assert told["second"].answers == ()


def test_a_request_that_allows_more_is_the_one_that_is_told_things_with(relay: RelayService, silos: Silos) -> None:
    """The older one was made before anybody was asked, and its answer has no room for an update."""
    told: Told = {}
    empty = hold(relay, told, "empty", request(hold_s=100.0))
    assert empty.is_alive()
    full = hold(relay, told, "full", replace(request(train("a"), hold_s=100.0), most=8))
    empty.join(10.0)
    assert told["empty"].answers == () and full.is_alive()
    silos.answers(1, [1, 2])
    relay.turn()
    full.join(10.0)
    assert [each.number for each in told["full"].answers] == ["s/a1"]


def test_another_server_hears_nothing_of_what_was_asked_before(relay: RelayService, silos: Silos) -> None:
    ask(relay, request(train("a")))
    silos.answers(1, [1, 2])
    relay.turn()
    ask(relay, request(train("b"), session="t"))
    silos.answers(1, [1, 2])
    silos.answers(2, [1, 2])
    relay.turn()
    reply, _ = ask(relay, request(session="t"))
    assert [each.number for each in reply.answers] == ["s/b1"]


def test_a_silo_that_is_gone_or_silent_is_not_waited_for(relay: RelayService, silos: Silos) -> None:
    ask(relay, request(train("a"), replace(train("b"), ttl_s=5.0)))
    silos.now_s = 6.0
    relay.turn()
    silos.answers(2, [1, 2])
    silos.here = silos.here[1:]
    relay.turn()
    assert not relay.waits
    reply, _ = ask(relay, request(train("a", 2)))
    assert [(each.number, each.problem) for each in reply.answers] == [("s/a2", "its node is not known to the relay")]


def test_words_and_problems_pass_as_they_are(relay: RelayService, silos: Silos) -> None:
    """And who asks who this is hears of the silos."""
    ask(relay, request(train("a"), train("b")))
    text = write_reply(InProgress(3, 24))
    silos.came = [SiloAnswer("m1", text), SiloAnswer("m2", problem="error 8: it died")]
    relay.turn()
    reply, _ = ask(relay, request())
    assert [(each.text, each.problem) for each in reply.answers] == [(text, ""), ("", "error 8: it died")]
    said, answer = relay.ask(SPEC, write_request(Describe()), None)
    assert [each.name for each in read_region_reply(said, "x").here] == ["a", "b"] and answer is None


def test_a_sealed_run_needs_the_server_s_file_of_keys(silos: Silos) -> None:
    config = StrategyConfig.load("fedavg", ["task={kind: digits}", "cipher={kind: bfv}", "min_silos=3"])
    with pytest.raises(ConfigError, match=r"relay has no server\.json"):
        RelayService(silos).ask(RunSpec.of(config, None, 3).dump(), write(request()), None)


def test_texts_that_are_too_long_or_none_are_refused() -> None:
    assert read_region_request("{") is None
    with pytest.raises(ProtocolError, match="characters"):
        read_region_request(" " * 70_000_000)
    with pytest.raises(ProtocolError, match="message"):
        read_region_reply("{", "relay")
    with pytest.raises(ProtocolError, match="silos"):
        read_region_reply(write(RegionReply(here=(RelayedNode(1),) * 1001)), "relay")


def test_a_server_holds_no_more_of_a_relay_than_a_bounded_part(relay: RelayService, silos: Silos) -> None:
    """A server that lies named run after run, with requests that were to be held for ever: a thread and a text each."""
    refused: list[str] = []

    def held(number: int) -> None:
        try:
            relay.ask(f"{SPEC} {number}", write(replace(request(hold_s=1e12), layout=None)), None)
        except LimitReached as error:
            refused.append(str(error))

    def waiting() -> int:
        return sum(len(run.held) for run in list(relay._runs.values()))

    threads = []
    for number in range(40):
        if waiting() < 32:  # the first request of a run is told at once who is here, the second is held
            relay.ask(f"{SPEC} {number}", write(replace(request(), layout=None)), None)
        threads.append(threading.Thread(target=held, args=[number], daemon=True))
        threads[-1].start()
        end_s = time.monotonic() + 10.0
        while waiting() + len(refused) <= number and time.monotonic() < end_s:
            time.sleep(0.01)
    assert (waiting(), len(refused)) == (32, 8)
    silos.now_s = 1e4
    for thread in threads:
        thread.join(10.0)
    assert not any(thread.is_alive() for thread in threads), "whatever the server says, ten minutes are enough"
    with pytest.raises(LimitReached, match="questions wait here"):
        ask(relay, request(*(train("a") for _ in range(8001))))
