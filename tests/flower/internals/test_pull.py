"""Answers over Flower's real grid; only its client of the SuperLink is a stand-in."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.run import Run
from flwr.superlink.grid.http_grid import HttpGrid

from fedsync.flower.internals import versions
from fedsync.flower.internals.pull import BESIDE, FEW_PARTS, SMALLEST_PART, Arrival, Arrivals
from tests.flower.grid import run_identity

pytestmark = pytest.mark.skipif(not versions.supported(), reason="this flwr is not a tested version")

LIMIT_S = 20.0
MOST = 2**21


class SuperLink:
    """Announces each answer once; the parts of those in ``slow`` are not there yet."""

    def __init__(self) -> None:
        self.slow: set[str] = set()
        self.asked: list[set[str]] = []
        self.confirmed: list[str] = []
        self.sent_bytes = 0
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

    def replace(self, question: str, kind: str, change: Callable[[bytes], bytes]) -> None:
        """Have the parts of one kind of an answer be something else."""
        for part, (belongs_to, content) in self._parts.items():
            if belongs_to == question and content.startswith(f"{kind} ".encode()):
                self._parts[part] = question, change(content)

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
        self.sent_bytes += len(part)
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


def pull_until(answers: Arrivals, questions: set[str], count: int, most: int = MOST) -> list[Arrival]:
    """Ask as a driver does: for what has no answer yet."""
    came: list[Arrival] = []
    end_s = time.monotonic() + LIMIT_S
    while len(came) < count:
        assert time.monotonic() < end_s, came
        came += answers.pull(dict.fromkeys(questions - {each.answers for each in came}, most))
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
    assert answers.pull({"a": MOST}) == []
    assert answers.pull({"a": MOST}) == []
    assert answers.pull({"a": MOST, "b": MOST}) == []
    assert superlink.asked == [{"a"}, {"b"}]


def test_nothing_is_asked_where_nothing_is_waited_for(superlink: SuperLink, answers: Arrivals) -> None:
    assert answers.pull({}) == []
    assert superlink.asked == []


def test_so_many_at_once_and_the_rest_after_them(superlink: SuperLink, answers: Arrivals) -> None:
    answers._at_once = 2
    names = {f"{number}" for number in range(5)}
    for name in names:
        superlink.answer(name, array(float(name)))
    superlink.slow |= names
    before = threading.active_count()
    assert answers.pull(dict.fromkeys(names, MOST)) == []
    assert threading.active_count() - before <= 2 * 3  # each with at most one helper a core, of two parts
    superlink.slow.clear()
    came = pull_until(answers, names, 5)
    assert {each.answers: value(each) for each in came} == {name: float(name) for name in names}


def test_an_error_is_told(superlink: SuperLink, answers: Arrivals) -> None:
    superlink.answer("a", Error(code=4, reason="out\n of memory"))
    (arrival,) = pull_until(answers, {"a"}, 1)
    assert arrival == Arrival("a", None, "error 4: out of memory", code=4)


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
    assert answers.pull({"a": MOST}) == []
    superlink.down = True
    with pytest.raises(httpx.ConnectError):
        pull_until(answers, {"a"}, 1)


# An answer is bounded before it is in memory.


def problems(superlink: SuperLink, answers: Arrivals, bad: RecordDict | None, most: int = MOST) -> str:
    """What is said of the answer of a, while b is heard; nothing is left of either at the SuperLink."""
    if bad is not None:
        superlink.answer("a", bad)
    superlink.answer("b", array(2.0))
    came = {each.answers: each for each in pull_until(answers, {"a", "b"}, 2, most)}
    assert value(came["b"]) == 2.0
    assert came["a"].content is None
    assert len(superlink.confirmed) == 2
    return came["a"].problem


def arrays(count: int, nbytes: int) -> RecordDict:
    """So many arrays of so many bytes each, all different."""
    made = {f"{number}": Array(np.full(nbytes, number, np.uint8)) for number in range(count)}
    return RecordDict({"update": ArrayRecord(made)})


def test_too_large_an_answer_is_given_up_in_the_middle(superlink: SuperLink, answers: Arrivals) -> None:
    """40 arrays of 256 KiB where 2 MiB are allowed: what is under way when they are used up still comes."""
    part = 2**18
    assert problems(superlink, answers, arrays(40, part)) == f"it has more than {MOST} bytes"
    under_way = (os.cpu_count() or 1) + 1
    assert superlink.sent_bytes < MOST + (under_way + 1) * (part + 1000)


def test_an_answer_of_just_the_size_is_taken(superlink: SuperLink, answers: Arrivals) -> None:
    superlink.answer("a", arrays(3, 1000))
    nbytes = sum(len(content) for _, content in superlink._parts.values())
    (arrival,) = pull_until(answers, {"a"}, 1, nbytes)
    assert arrival.content is not None, arrival.problem
    superlink.answer("b", arrays(3, 1000))
    (arrival,) = pull_until(answers, {"b"}, 1, nbytes - 1)
    assert arrival.problem == f"it has more than {nbytes - 1} bytes"


def test_an_answer_of_too_many_parts_is_not_even_begun(superlink: SuperLink, answers: Arrivals) -> None:
    """Each array makes two parts: itself and its data."""
    most = FEW_PARTS + MOST // SMALLEST_PART
    superlink.answer("a", arrays(most // 2, 4))
    (arrival,) = pull_until(answers, {"a"}, 1)
    assert arrival.problem == f"it has more than {most} parts"
    assert (superlink.sent_bytes, len(superlink.confirmed)) == (0, 1)


def test_a_part_named_many_times_is_as_large_as_what_it_becomes(superlink: SuperLink, answers: Arrivals) -> None:
    """4 KiB, which the array says to consist of a thousand times."""
    superlink.answer("a", arrays(1, 4096))

    def again_and_again(content: bytes) -> bytes:
        head, _, body = content.partition(b"\0")
        body = body.replace(b"[0]", b"[" + b"0," * 999 + b"0]")
        return b" ".join([*head.split(b" ")[:2], str(len(body)).encode()]) + b"\0" + body

    superlink.replace("a", "Array", again_and_again)
    assert problems(superlink, answers, None) == f"its arrays have more than {MOST} bytes"


def test_an_array_is_made_of_data_and_not_of_arrays(superlink: SuperLink, answers: Arrivals) -> None:
    """What should be the data of an array is an array."""
    superlink.answer("a", arrays(1, 4096))
    superlink.replace("a", "ArrayChunk", lambda content: b'Array  22\0{"arraychunk_ids": []}')
    assert problems(superlink, answers, None) == "an array in it is not made of data"


def test_an_array_of_zeros_still_comes_as_one_part(superlink: SuperLink, answers: Arrivals) -> None:
    zeros = np.zeros(3_000_000, np.float32)
    superlink.answer("a", RecordDict({"update": ArrayRecord({"weights": Array(zeros)})}))
    (arrival,) = pull_until(answers, {"a"}, 1, BESIDE + zeros.nbytes)
    assert value(arrival) == 0.0


def test_what_becomes_python_objects_is_bounded_where_arrays_may_be_large(
    superlink: SuperLink, answers: Arrivals
) -> None:
    bad = RecordDict({"fedsync": ConfigRecord({"numbers": [1.0] * (BESIDE // 8 + 1000)})})
    assert problems(superlink, answers, bad, most=10 * BESIDE).endswith("bytes beside arrays")


@pytest.mark.parametrize(
    ("kind", "other", "said"),
    [
        ("RecordDict", ConfigRecord().deflate(), "it cannot be read: MessageInitializationError"),
        ("Message", ConfigRecord().deflate(), "it is no message but a ConfigRecord"),
        ("Array", b"Array  1\0[", "it cannot be read: JSONDecodeError"),
        ("Array", b"Array  100001\0" + b"[" * 100_001, "it cannot be read: RecursionError"),
        ("Array", b'Array  22\0{"arraychunk_ids": [9]}', "it cannot be read: IndexError"),
        ("Array", b"Array", "it cannot be read: "),
        ("RecordDict", b"list  0\0", "it cannot be read: "),
    ],
)
def test_what_is_put_together_wrong_is_that_silos_problem_alone(
    kind: str, other: bytes, said: str, superlink: SuperLink, answers: Arrivals
) -> None:
    superlink.answer("a", array(1.0))
    superlink.replace("a", kind, lambda content: other)
    assert problems(superlink, answers, None).startswith(said)
