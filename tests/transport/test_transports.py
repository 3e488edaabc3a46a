"""Contract that server and relays rely on, in each transport: HTTPS, Flower's messages, memory."""

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict

from fedsync.flower import flower_messages as messages
from fedsync.flower.grid_transport import GridTransport
from fedsync.flower.hub_transport import HubTransport
from fedsync.model.transfer import Payload
from fedsync.transport.hub_line import HubLine
from fedsync.transport.port import BESIDE_BYTES, HEAD, Blob, FrameHead, SiloAnswer, SiloQuestion, Transport
from tests.flower.grid import DirectGrid, run_identity
from tests.flower.named_nodes import silent
from tests.transport.hubs import Served, served
from tests.transport.memory_transport import MemorySilo, MemoryTransport

GARBLED = SiloAnswer("", "garbled")
"""Answer of a silo whose bytes are none."""


class Network(Protocol):
    """A transport, and the nodes that it reaches.

    Args:
        holds: whether it keeps questions until they are answered.
        wakes: whether an answer ends a wait.
    """

    holds: bool
    wakes: bool

    @property
    def transport(self) -> Transport: ...

    def join(self, node: int, silo: MemorySilo, name: str = "") -> None: ...

    def leave(self, node: int) -> None: ...


class InMemory:
    holds, wakes = True, True

    def __init__(self, *, threads: bool) -> None:
        self.transport = MemoryTransport(threads=threads)
        self.leave = self.transport.leave

    def join(self, node: int, silo: MemorySilo, name: str = "") -> None:
        def answer(asked: SiloQuestion, payload: Payload | None) -> SiloAnswer | None:
            found = silo(asked, payload)
            return replace(found, text="\ud800") if found is GARBLED else found

        self.transport.join(node, answer, name)


class OverFlower:
    holds, wakes = False, False

    def __init__(self) -> None:
        self._grid = DirectGrid(9)
        self._grid.nodes.clear()
        self.transport = GridTransport(self._grid)
        self.leave = self._grid.nodes.discard

    def join(self, node: int, silo: MemorySilo, name: str = "") -> None:
        self._grid.nodes.add(node)
        self._grid.starts[node] += 1
        self._grid.names[node] = name

        def answer(message: Message, context: Context) -> Message | None:
            spec, text, payload = messages.read_request(message)
            found = silo(SiloQuestion(text, payload, spec=spec), payload)
            if found is GARBLED:
                return Message(RecordDict(), reply_to=message)
            return None if found is None else messages.answer(message, found.text, found.payload, relay=found.relay)

        self._grid.answers[node] = answer


class OverHttps:
    holds, wakes = True, True

    def __init__(self, up: Served, folder: Path) -> None:
        self._up, self._folder, self._names = up, folder, dict[int, str]()
        nobody: Any = None  # no grid: silos come by themselves
        self.transport = HubTransport(nobody, up.hub, folder, [up.address], up.authority)

    def join(self, node: int, silo: MemorySilo, name: str = "") -> None:
        self._names[node] = f"{node} {name}".rstrip()
        line = self._up.joined(self._names[node])
        threading.Thread(target=self._serve, args=(line, silo), daemon=True).start()

    def leave(self, node: int) -> None:
        self._up.hub.strike_off(self._names[node])

    def _serve(self, line: HubLine, silo: MemorySilo) -> None:
        after = 0
        with suppress(Exception):  # struck off, or the test is over
            while True:
                if (asked := line.asked(after)) is None:
                    continue
                after, payload = asked.number, asked.payload
                if isinstance(payload, Blob):
                    line.fetch(payload, self._folder / "blob")
                    payload = np.fromfile(self._folder / "blob", np.uint8)
                found = silo(SiloQuestion(asked.text, payload, spec=asked.spec), payload)
                if found is GARBLED:
                    head = FrameHead(2, asked.number).dump()
                    line._http.post("/answers", headers={**line._known(), HEAD: head}, content=b"\xff\xfe")
                elif found is not None:
                    with suppress(Exception):  # refused
                        line.answer(replace(asked, most=2**40), found.text, found.payload, relay=found.relay)


@pytest.fixture(params=["hub", "grid", "memory", "memory, threads"])
def net(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Network]:
    if request.param == "hub":
        with served(tmp_path) as up:
            yield OverHttps(up, tmp_path)
    elif request.param == "grid":
        with run_identity():
            yield OverFlower()
    else:
        yield InMemory(threads="threads" in request.param)


def echo(asked: SiloQuestion, payload: Payload | None) -> SiloAnswer:
    return SiloAnswer("", asked.text, payload)


def ask(net: Network, *questions: tuple[int, str]) -> list[str | None]:
    return net.transport.send([(node, SiloQuestion(text)) for node, text in questions])


def answers(net: Network, count: int = 1) -> list[SiloAnswer]:
    """All answers once there are so many, and what comes soon after."""
    found, end_s = list[SiloAnswer](), time.monotonic() + 20.0
    while len(found) < count:
        assert time.monotonic() < end_s
        net.transport.wait(0.02)
        found += net.transport.receive()
    net.transport.wait(0.05)
    return found + net.transport.receive()


def test_peers_are_the_connected_nodes_and_one_that_was_away_is_another(net: Network) -> None:
    net.join(1, echo, "berlin")
    net.join(2, echo)
    first = net.transport.peers()
    assert [(peer.node_id, peer.name) for peer in first] == [(1, "berlin"), (2, "")]
    assert net.transport.peers() == first
    net.leave(1)
    assert net.transport.peers() == first[1:] and ask(net, (1, "gone")) == [None]
    net.join(1, echo, "berlin")
    back = {peer.node_id: peer for peer in net.transport.peers()}
    assert back[2] == first[1] and back[1].name == "berlin" and back[1].since != first[0].since


def test_each_question_reaches_its_node_once_and_has_one_answer(net: Network) -> None:
    heard = list[tuple[int, str, str]]()

    def silo(node: int) -> MemorySilo:
        def answer(asked: SiloQuestion, payload: Payload | None) -> SiloAnswer:
            heard.append((node, asked.text, asked.spec))
            return SiloAnswer("", f"{asked.text} of {node}", relay=node == 2)

        return answer

    net.join(1, silo(1))
    net.join(2, silo(2))
    asked = [(2, "one ü"), (3, "nobody"), (1, "two"), (2, "three")]
    first, nobody, second, third = net.transport.send([(node, SiloQuestion(text, spec="{}")) for node, text in asked])
    assert nobody is None and len({first, second, third}) == 3
    found = {(answer.name, answer.text, answer.relay) for answer in answers(net, 3)}
    assert found == {(first, "one ü of 2", True), (second, "two of 1", False), (third, "three of 2", True)}
    assert sorted(heard) == sorted((node, text, "{}") for node, text in asked if node != 3)
    assert net.transport.receive() == []


@pytest.mark.parametrize("nbytes", [None, 0, 1, BESIDE_BYTES, BESIDE_BYTES + 4, 3_000_000])
def test_payloads_pass_unchanged_and_answers_are_as_large_as_questions_permit(net: Network, nbytes: int | None) -> None:
    heard = list[Payload | None]()

    def turned(asked: SiloQuestion, payload: Payload | None) -> SiloAnswer:
        heard.append(payload)
        return SiloAnswer("", "turned", None if payload is None else payload[::-1].copy())

    net.join(1, turned)
    sent = None if nbytes is None else np.random.default_rng(1).integers(0, 256, nbytes, np.uint8)
    values = sent if sent is None or nbytes == 1 else sent.view(np.float32)
    net.transport.send([(1, SiloQuestion("turn", values, most=nbytes or 0))])
    (found,) = answers(net)
    for got, expected in ((heard[0], sent), (found.payload, None if sent is None else sent[::-1])):
        assert (got is None) == (sent is None)
        assert got is None or expected is None or (got.dtype == np.uint8 and got.tobytes() == expected.tobytes())


@pytest.mark.parametrize("beside", [False, True])
def test_an_answer_larger_than_its_question_permits_is_one_problem(net: Network, beside: bool) -> None:
    nbytes = BESIDE_BYTES + 2 if beside else 11

    def large(asked: SiloQuestion, payload: Payload | None) -> SiloAnswer:
        return SiloAnswer("", asked.text, np.ones(nbytes, np.uint8))

    net.join(1, large)
    net.transport.send([(1, SiloQuestion("large", most=nbytes - 1)), (1, SiloQuestion("fits", most=nbytes))])
    refused, found = sorted(answers(net, 2), key=lambda answer: answer.text)
    assert refused.check == "length" and refused.problem and refused.payload is None and refused.text == ""
    assert (found.text, found.problem) == ("fits", "")


def test_an_answer_that_is_none_is_a_problem_or_ignored(net: Network) -> None:
    net.join(1, lambda asked, payload: GARBLED if asked.text == "one" else echo(asked, payload))
    first, second = ask(net, (1, "one"), (1, "two"))
    net.transport.wait(0.05)
    found = answers(net)
    assert [answer.text for answer in found if answer.name == second] == ["two"]
    assert [bool(answer.problem) for answer in found if answer.name == first] in ([], [True])
    assert all(answer.name in (first, second) for answer in found)


def test_answers_to_dropped_questions_are_not_returned(net: Network) -> None:
    net.join(1, echo)
    first, second = ask(net, (1, "one"), (1, "two"))
    net.transport.keep({second or ""})
    assert [answer.name for answer in answers(net)] == [second]
    assert net.transport.waiting([first or "", second or ""]) == set()
    net.join(2, silent)
    for _ in range(20):
        assert ask(net, (2, "one")) != [None], "they take no room"
        net.transport.keep(())


def test_questions_that_cannot_be_lost_need_no_repetition(net: Network) -> None:
    net.join(1, echo)
    (name,) = ask(net, (1, "one"))
    assert net.transport.waiting([name or "", "other"]) == ({name} if net.holds else set())
    answers(net)
    assert net.transport.waiting([name or ""]) == set()


def test_a_node_that_comes_back_answers_what_it_is_asked_then(net: Network) -> None:
    go_on = threading.Event()

    def late(asked: SiloQuestion, payload: Payload | None) -> SiloAnswer:
        if threading.current_thread() is not threading.main_thread():
            go_on.wait(20.0)
        return echo(asked, payload)

    net.join(1, late)
    ask(net, (1, "one"))
    net.leave(1)
    net.join(1, echo)
    go_on.set()
    ask(net, (1, "two"))
    texts = [answer.text for answer in answers(net)]
    assert texts == ["two"] or (not net.holds and texts == ["one", "two"])


def test_a_wait_ends_with_an_answer_or_its_time(net: Network) -> None:
    def slow(asked: SiloQuestion, payload: Payload | None) -> SiloAnswer:
        time.sleep(0.1)
        return echo(asked, payload)

    net.join(1, slow)
    begin_s = time.monotonic()
    net.transport.wait(0.1)
    assert 0.09 < time.monotonic() - begin_s < 10 and net.transport.receive() == []
    ask(net, (1, "one"))
    net.transport.wait(20.0 if net.wakes else 0.1)
    assert time.monotonic() - begin_s < 10
    assert [answer.text for answer in net.transport.receive()] == ["one"]
