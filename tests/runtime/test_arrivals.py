"""Answers over Flower's real grid; only its client of the SuperLink is a stand-in."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.run import Run
from flwr.superlink.grid.http_grid import HttpGrid

from fedsync.runtime import arrivals, executor
from fedsync.runtime.arrivals import Arrival, Arrivals
from tests.runtime.grid import run_identity

pytestmark = pytest.mark.skipif(not executor.supported(), reason="this flwr is not a tested version")

LIMIT_S = 20.0


class SuperLink:
    """Announces each answer once; the parts of those in ``slow`` are not there yet."""

    def __init__(self) -> None:
        self.slow: set[str] = set()
        self.asked: list[set[str]] = []
        self.confirmed: list[str] = []
        self.down = False
        self._announced: dict[str, Message] = {}
        self._parts: dict[str, tuple[str, bytes]] = {}

    def answer(self, question: str, content: RecordDict | Error) -> None:
        asked = Message(RecordDict(), dst_node_id=1, message_type="train")
        vars(asked.metadata)["_message_id"] = question
        answer = Message(content, reply_to=asked)
        vars(answer.metadata)["_message_id"] = answer.object_id
        self._announced[question] = answer
        for part, made in get_all_nested_objects(answer).items():
            self._parts[part] = question, made.deflate()

    def spoil(self, question: str) -> None:
        """Have all parts of an answer be something else."""
        for part, (belongs_to, _) in self._parts.items():
            if belongs_to == question:
                self._parts[part] = question, b"nonsense"

    def PullMessages(self, request: PullAppMessagesRequest) -> PullAppMessagesResponse:
        if self.down:
            raise httpx.ConnectError("refused")
        self.asked.append(set(request.message_ids))
        found = [self._announced.pop(name) for name in request.message_ids if name in self._announced]
        return PullAppMessagesResponse(
            messages_list=[message_to_proto(remove_content_from_message(each)) for each in found],
            message_object_trees=[get_object_tree(each) for each in found],
        )

    def PullObject(self, request: PullObjectRequest) -> PullObjectResponse:
        question, part = self._parts[request.object_id]
        if self.down:
            raise httpx.ConnectError("refused")
        there = question not in self.slow
        return PullObjectResponse(object_found=True, object_available=there, object_content=part if there else b"")

    def ConfirmMessageReceived(self, request: Any) -> None:
        self.confirmed.append(request.message_object_id)


@pytest.fixture
def superlink() -> SuperLink:
    return SuperLink()


@pytest.fixture
def answers(superlink: SuperLink, monkeypatch: pytest.MonkeyPatch) -> Iterator[Arrivals]:
    from flwr.supercore.inflatable import inflatable_utils

    defaults = inflatable_utils.pull_objects.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "initial_backoff", 0.001)
    monkeypatch.setitem(defaults, "backoff_cap", 0.01)
    monkeypatch.setitem(defaults, "max_tries_per_object", None)
    grid: Any = HttpGrid(token="token")
    grid._client = superlink
    grid.set_run(Run.create_empty(1))
    with run_identity():
        yield Arrivals(grid)
    superlink.slow.clear()


def array(value: float) -> RecordDict:
    return RecordDict({"update": ArrayRecord({"weights": Array(np.full(3, value, np.float32))})})


def value(arrival: Arrival) -> float:
    assert arrival.content is not None, arrival.problem
    record = arrival.content.content["update"]
    assert isinstance(record, ArrayRecord)
    return float(record["weights"].numpy()[0])


def pull_until(answers: Arrivals, questions: set[str], count: int) -> list[Arrival]:
    """Ask as a driver does: for what has no answer yet."""
    came: list[Arrival] = []
    end_s = time.monotonic() + LIMIT_S
    while len(came) < count:
        assert time.monotonic() < end_s, came
        came += answers.pull(questions - {each.answers for each in came})
    return came


def test_an_answer_on_its_way_keeps_none_waiting(superlink: SuperLink, answers: Arrivals) -> None:
    superlink.answer("a", array(1.0))
    superlink.answer("b", array(2.0))
    superlink.slow.add("a")
    (first,) = pull_until(answers, {"a", "b", "c"}, 1)
    assert (first.answers, value(first)) == ("b", 2.0)
    superlink.answer("c", array(3.0))
    (second,) = pull_until(answers, {"a", "c"}, 1)
    assert (second.answers, value(second)) == ("c", 3.0)
    superlink.slow.clear()
    (third,) = pull_until(answers, {"a"}, 1)
    assert (third.answers, value(third)) == ("a", 1.0)
    assert len(superlink.confirmed) == 3


def test_what_was_announced_is_not_asked_for_again(superlink: SuperLink, answers: Arrivals) -> None:
    superlink.answer("a", array(1.0))
    superlink.slow.add("a")
    assert answers.pull(["a"]) == []
    assert answers.pull(["a"]) == []
    assert answers.pull(["a", "b"]) == []
    assert superlink.asked == [{"a"}, {"b"}]


def test_nothing_is_asked_where_nothing_is_waited_for(superlink: SuperLink, answers: Arrivals) -> None:
    assert answers.pull([]) == []
    assert superlink.asked == []


def test_so_many_at_once_and_the_rest_after_them(
    superlink: SuperLink, answers: Arrivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "MOST_AT_ONCE", 2)
    names = {f"{number}" for number in range(5)}
    for name in names:
        superlink.answer(name, array(float(name)))
    superlink.slow |= names
    before = threading.active_count()
    assert answers.pull(names) == []
    assert threading.active_count() - before <= 2 * 3  # each with at most one helper a core, of two parts
    superlink.slow.clear()
    came = pull_until(answers, names, 5)
    assert {each.answers: value(each) for each in came} == {name: float(name) for name in names}


def test_an_error_is_told(superlink: SuperLink, answers: Arrivals) -> None:
    superlink.answer("a", Error(code=4, reason="out\n of memory"))
    (arrival,) = pull_until(answers, {"a"}, 1)
    assert arrival == Arrival("a", None, "error 4: out of memory")


def test_bytes_that_flower_cannot_read_are_that_silos_problem_alone(superlink: SuperLink, answers: Arrivals) -> None:
    superlink.answer("a", array(1.0))
    superlink.answer("b", array(2.0))
    superlink.spoil("a")
    came = {each.answers: each for each in pull_until(answers, {"a", "b"}, 2)}
    assert came["a"].content is None and came["a"].problem.startswith("it cannot be read: ")
    assert value(came["b"]) == 2.0


def test_a_superlink_that_is_gone_is_no_silos_problem(superlink: SuperLink, answers: Arrivals) -> None:
    superlink.answer("a", array(1.0))
    superlink.slow.add("a")
    assert answers.pull(["a"]) == []
    superlink.down = True
    with pytest.raises(httpx.ConnectError):
        pull_until(answers, {"a"}, 1)
