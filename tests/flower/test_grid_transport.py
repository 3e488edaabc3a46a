"""Flower's messages as a transport: what goes together, and what is no answer."""

import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message
from flwr.app.error import Error

from fedsync.flower import flower_messages as messages
from fedsync.flower.flower_messages import MOST_TOGETHER
from fedsync.flower.grid_transport import GridTransport
from fedsync.flower.payloads import SMALL_BYTES
from fedsync.model.transfer import Payload
from fedsync.silo.protocol import Describe, Question, write_request
from fedsync.transport.port import SiloAnswer, SiloQuestion
from tests.flower.grid import Answer, DirectGrid

pytestmark = pytest.mark.usefixtures("silos_here")

FIRST, SECOND = write_request(Describe()), write_request(Question())


def echo(message: Message, context: Context) -> Message:
    """A silo that answers with what it was asked, and what came beside it."""
    _, text, payload = messages.read_request(message)
    return messages.answer(message, text, payload)


def bytes_(count: int) -> Payload:
    return np.ones(count, np.uint8)


def question(payload: Payload | None = None, most: int = 0) -> SiloQuestion:
    return SiloQuestion(FIRST, payload, most)


class Counting(DirectGrid):
    """A grid of silos that do not answer, and which nodes each request to the SuperLink was for."""

    def __init__(self, nodes: int) -> None:
        super().__init__(nodes, dict.fromkeys(range(1, nodes + 1), lambda message, context: None))
        self.requests: list[list[int]] = []

    def push_messages(self, sent: Iterable[Message]) -> Iterable[str]:
        sent = list(sent)
        self.requests.append([each.metadata.dst_node_id for each in sent])
        return list(super().push_messages(sent))


def asked(answer: Answer, sent: SiloQuestion) -> SiloAnswer:
    """What comes of a question to a silo that answers so."""
    silos = GridTransport(DirectGrid(1, {1: answer}))
    (name,) = silos.send([(1, sent)])
    (found,) = silos.receive()
    assert found.name == name
    return found


def test_an_error_of_flower_s_is_no_answer_and_says_its_code() -> None:
    found = asked(lambda message, context: Message(Error(2, "disk\x1b full"), reply_to=message), question())
    assert (found.problem, found.check, found.code) == ("error 2: disk\\x1b full", "answer", 2)


def test_small_questions_go_together_and_a_node_that_is_gone_loses_its_own_only() -> None:
    grid = Counting(2)
    nodes = [1] * MOST_TOGETHER + [3, 2]
    names = GridTransport(grid).send([(node, question(bytes_(1))) for node in nodes])
    assert [node for node, name in zip(nodes, names, strict=True) if name is None] == [3]
    assert grid.requests == [nodes[:MOST_TOGETHER], [3, 2]]


def test_a_large_question_goes_alone() -> None:
    grid, large = Counting(2), {1: SMALL_BYTES + 1, 2: 1}
    GridTransport(grid).send([(node, question(bytes_(large[node]))) for node in (2, 1, 1, 2, 2)])
    assert grid.requests == [[2], [1], [1], [2, 2]]


def test_at_most_one_copy_of_a_large_payload_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy for each of a hundred silos would be a hundred models."""
    alive, most, plain = set[int](), [0], messages.request

    def counted(node: int, question: SiloQuestion) -> Message:
        message = plain(node, question)
        if message.content.array_records:
            alive.add(id(message))
            weakref.finalize(message, alive.discard, id(message))
        most[0] = max(most[0], len(alive))
        return message

    monkeypatch.setattr(messages, "request", counted)
    large = bytes_(SMALL_BYTES + 1)
    grid = Counting(3)
    names = GridTransport(grid).send([(node, question(large)) for node in (1, 4, 2, 3)])
    assert [name is None for name in names] == [False, True, False, False]
    assert grid.requests == [[1], [4], [2], [3]]
    assert most == [1]


def test_what_is_too_large_for_flower_is_lost() -> None:
    grid: Any = Counting(1)
    grid.push_messages = lambda sent: []
    silos = GridTransport(grid)
    assert silos.send([(1, question()), (1, question())]) == [None, None]
    assert silos.receive() == []


def test_an_answer_is_heard_once_however_often_a_superlink_hands_it_out() -> None:
    grid = DirectGrid(1, {1: echo})
    silos = GridTransport(grid)
    silos.send([(1, SiloQuestion(FIRST))])
    (reply,) = grid.pull_messages(list(silos._sent))
    silos.send([(1, SiloQuestion(SECOND))])
    patched: Any = grid
    patched.pull_messages = lambda identifiers: [reply]
    assert [answer.text for answer in silos.receive()] == [FIRST] and silos.receive() == []
