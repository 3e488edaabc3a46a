"""What the server has sent: marks on orders, and answers to what is forgotten."""

from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedsync.common.errors import ProtocolError
from fedsync.core.orders import Evaluation, WorkOrder
from fedsync.core.report_checks import MAX_SUMS
from fedsync.server.nodes import AnotherApp, Nodes
from fedsync.server.outbox import Outbox, PendingMessage
from fedsync.server.timeouts import Timeouts
from fedsync.silo.protocol import (
    MAX_EVALUATION_TEXT,
    MAX_LAYOUT_TEXT,
    MAX_TEXT,
    Answer,
    AskModel,
    AskSnapshot,
    Collect,
    Describe,
    EvaluateModel,
    Question,
    Request,
    Train,
    write_reply,
)
from fedsync.transport.port import SiloAnswer, SiloQuestion
from tests.flower.named_nodes import saying, silent, silos_of
from tests.transport.memory_transport import MemoryTransport

ORDER = WorkOrder(update_id="a/1", base_version=0, round=1, batch_size=8, max_steps=1, learning_rate=0.1, seed=0)
SMALL = 2**20
NOBODY = MemoryTransport()


@pytest.fixture
def outbox() -> Outbox:
    """One that waits for no report."""
    return Recording(report_s=0.0).outbox


@pytest.mark.parametrize("flushed", [False, True])
def test_an_order_is_halted_on_its_way_and_before(outbox: Outbox, flushed: bool) -> None:
    outbox.train("a", ORDER, 0.0)
    outbox.evaluate("a", EvaluateModel(3), 0.0)
    if flushed:
        assert outbox.flush() == []
    assert outbox.halt("a/1")
    assert [sent.halt for sent in outbox.waiting] == [True, False]


def test_an_order_that_nobody_was_sent_is_not_halted(outbox: Outbox) -> None:
    outbox.train("a", ORDER, 0.0)
    assert not outbox.halt("a/2")
    outbox.forget(1)
    assert not outbox.halt("a/1")


def test_what_has_no_answer_is_asked_for_again_ever_later(outbox: Outbox) -> None:
    outbox.ask(1, Describe(), 0.0)
    times = []
    for now_s in range(100):
        outbox.flush()
        for sent in outbox.unanswered(now_s):
            times.append(now_s)
            outbox.ask_again(sent, now_s)
    assert times == [10, 30, 70], "after 10 s, 20 s and 40 s more"


def test_where_all_answers_take_long_none_is_missed_sooner() -> None:
    """One silo answers a hundred questions, each after 9 s of the 10 s that it has, and another never answers."""
    silos: Any = silos_of(saying(Answer()), silent)
    silos.waiting = lambda names: set()  # as where any question may be lost
    outbox = Outbox(silos, Nodes(NOBODY), "{}", Timeouts(ask_s=10.0), 0.0)

    def missed_after() -> float:
        outbox.ask(2, Describe(), now_s)
        outbox.flush()
        missed = next(late_s for late_s in range(100) if outbox.unanswered(now_s + late_s))
        outbox.forget(2)
        return missed

    now_s = 0.0
    assert missed_after() == 10
    outbox.ask(1, Describe(), now_s)
    outbox.flush()
    now_s += 3600.0
    assert outbox.unanswered(now_s) and len(outbox.replies(now_s)) == 1
    assert missed_after() == 10, "a silo that holds one answer back makes no other late"
    for _ in range(100):
        outbox.ask(1, Describe(), now_s)
        outbox.flush()
        now_s += 9.0
        assert outbox.unanswered(now_s) == []
        assert len(outbox.replies(now_s)) == 1
    assert missed_after() == 18, "twice the usual"
    for _ in range(100):
        outbox.ask(1, Describe(), now_s)
        outbox.flush()
        assert outbox.unanswered(now_s) == []
        assert len(outbox.replies(now_s)) == 1  # at once
    assert missed_after() == 10


def test_silos_are_asked_for_a_snapshot_in_turn(outbox: Outbox) -> None:
    """A silo that always answered last was asked each time. With invalid snapshots it kept all newcomers out."""
    asked = []
    for _ in range(4):
        outbox.snapshot(0.0)
        outbox.snapshot(0.0)  # one is pending
        (sent,) = outbox.waiting
        asked.append(sent.node)
        outbox.forget(sent.node)
    assert sorted(asked) == [1, 1, 2, 2]


def test_what_cannot_be_lost_is_not_asked_for_again(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two orders one is lost, and the other fetched by the second look, and lost then."""
    looks: list[list[str]] = []

    def waiting(identifiers: Collection[str]) -> set[str]:
        looks.append(sorted(identifiers))
        return {first} if len(looks) == 1 else set()

    monkeypatch.setattr(outbox._transport, "waiting", waiting)
    for number, begun_s in ((1, 0.0), (2, 2.0)):
        outbox.train("a", replace(ORDER, update_id=f"a/{number}"), begun_s)
    outbox.flush()
    first, second = outbox._sent
    asked = [(now_s, sent.order) for now_s in range(40) for sent in outbox.unanswered(now_s)]
    assert [(now_s, order and order.update_id) for now_s, order in asked] == [(12, "a/2"), (20, "a/1")]
    assert looks == [[first, second], [second], [first]], "one for all that are due soon"


@pytest.mark.parametrize(
    ("request_", "nbytes"),
    [
        (Train(ORDER), 10),
        (AskSnapshot(), 30),
        (AskModel(), 10 + SMALL),
        (EvaluateModel(3), SMALL),
        (Question(), SMALL),
        (Describe(), SMALL),
    ],
)
def test_an_answer_may_be_as_large_as_what_was_asked_for(outbox: Outbox, request_: Request, nbytes: int) -> None:
    """10 bytes for an update, and for a model; a snapshot may have several models."""
    outbox.repeat(PendingMessage(1, request_, 9.0), "a", 0.0)
    (question,) = (question for _, question in outbox._posted)
    assert isinstance(question, SiloQuestion) and question.most == nbytes


@pytest.mark.parametrize(
    ("request_", "code", "error"),
    [(Describe(), 2, AnotherApp), (AskModel(), 1, AnotherApp), (Describe(), 5, ProtocolError),
     (Question(), 2, ProtocolError), (Describe(), None, ProtocolError)],
)  # fmt: skip
def test_what_is_no_answer_says_whose_it_is_and_why(
    outbox: Outbox, request_: Request, code: int | None, error: type[ProtocolError]
) -> None:
    """What the transport could not bring or read; an error of the ClientApp, if it is the first answer, says that."""
    sent = PendingMessage(1, request_, 0.0)
    with pytest.raises(ProtocolError, match=r"node 1 failed the check 'answer': .*no disk") as caught:
        outbox.read(sent, SiloAnswer("", problem="no disk", code=code))
    assert type(caught.value) is error
    with pytest.raises(ProtocolError, match="node 1 failed the check 'length': 9 bytes"):
        outbox.read(sent, SiloAnswer("", problem="9 bytes", check="length"))


@pytest.mark.parametrize(
    ("request_", "most"),
    [(AskModel(), MAX_LAYOUT_TEXT), (EvaluateModel(1), MAX_EVALUATION_TEXT), (Describe(), MAX_TEXT)],
)
def test_a_text_is_no_longer_than_what_was_asked_for(outbox: Outbox, request_: Request, most: int) -> None:
    """The names of all arrays may be in one."""
    text = write_reply(Answer())
    for length, error in ((most, nullcontext()), (most + 1, pytest.raises(ProtocolError, match=f"at most {most}"))):
        with error:
            reply, _ = outbox.read(PendingMessage(1, request_, 0.0), SiloAnswer("", text.ljust(length)))
            assert reply == Answer()


@pytest.mark.parametrize("request_", [EvaluateModel(1), Train(ORDER), Collect("a/1")])
def test_an_evaluation_with_all_the_sums_that_a_report_may_have_is_read(outbox: Outbox, request_: Request) -> None:
    """The longest float; histograms of the scores of 100 classes are 12,800 sums."""
    found = Evaluation(1.0, 1.0, 9, sums={"own": (-1.7976931348623157e-308,) * MAX_SUMS})
    reply, _ = outbox.read(PendingMessage(1, request_, 0.0), SiloAnswer("", write_reply(found)))
    assert reply == found


class Recording:
    """Two silos that never answer, and what an aggregator was asked and told."""

    def __init__(self, report_s: float = 5.0) -> None:
        self.given_up: list[str] = []
        self.held: list[tuple[str, int]] = []
        self.asks = [{"a": np.zeros(1, np.uint8), "gone": np.zeros(1, np.uint8)}]
        nodes = Nodes(NOBODY)
        nodes.by_name.update(a=1, b=2)
        aggregator: Any = SimpleNamespace(
            outgoing=lambda silo, subject: np.zeros(1, np.uint8),
            upload_bytes=10,
            snapshot_bytes=30,
            wants_snapshot=True,
            questions=lambda: self.asks.pop() if self.asks else {},
            give_up=self.given_up.append,
            holds=lambda silo, version: self.held.append((silo, version)),
        )
        self.outbox = Outbox(silos_of(silent, silent), nodes, "{}", Timeouts(ask_s=10.0), report_s, aggregator, 10)

    def answers(self, *identifiers: str) -> list[PendingMessage]:
        """What these messages turn out to have been, once their answers are here."""
        arrived: Any = SimpleNamespace(receive=lambda: [SiloAnswer(one) for one in identifiers])
        self.outbox._transport = arrived
        return [sent for sent, _ in self.outbox.replies(0.0)]


def test_what_cannot_be_sent_is_lost_and_no_longer_waited_for() -> None:
    recording = Recording()
    recording.outbox._nodes.by_name["gone"] = 3
    for name in ("a", "gone", "b"):
        recording.outbox.train(name, replace(ORDER, update_id=f"{name}/1"), 0.0)
    assert [sent.node for sent in recording.outbox.flush()] == [3]
    assert [sent.node for sent in recording.outbox.waiting] == [1, 2]


def test_the_transport_forgets_what_is_not_waited_for() -> None:
    outbox, kept = Recording().outbox, list[set[str]]()
    outbox.ask(1, Describe(), 0.0)
    outbox.ask(2, Describe(), 0.0)
    outbox.flush()
    transport: Any = outbox._transport
    transport.keep = lambda names: kept.append(set(names))
    outbox.forget(1)
    outbox.flush()
    assert kept == [{name for name, sent in outbox._sent.items() if sent.node == 2}] and len(kept[0]) == 1


def test_an_answer_counts_once_and_ends_what_asked_for_the_same() -> None:
    recording = Recording()
    outbox = recording.outbox
    outbox.train("b", ORDER, 0.0)
    outbox.ask(1, Describe(), 0.0)
    outbox.flush()
    for now_s in (10.0, 30.0):
        (sent,) = (one for one in outbox.unanswered(now_s) if one.node == 1)
        outbox.ask_again(sent, now_s)
        outbox.flush()
    first, *_, last = (identifier for identifier, sent in outbox._sent.items() if sent.node == 1)
    assert [sent.request for sent in recording.answers(last)] == [Describe()]
    assert [sent.node for sent in outbox.waiting] == [2]
    assert recording.answers(last) == recording.answers(first) == []


def test_an_order_is_asked_for_once_its_silo_should_have_reported() -> None:
    outbox = Recording().outbox
    outbox.train("a", ORDER, 0.0)
    outbox.flush()
    assert outbox.unanswered(14.0) == [] and len(outbox.unanswered(15.0)) == 1, "5 s for the report, 10 s of patience"


def test_an_order_is_overdue_when_its_time_is_over() -> None:
    outbox = Recording().outbox
    outbox.train("a", ORDER, 0.0)
    outbox.flush()
    assert outbox.overdue(3599.0) == [] and [sent.order for sent in outbox.overdue(3600.0)] == [ORDER]


def test_what_a_silo_is_sent_continues_what_it_will_hold_after_the_orders_that_it_has() -> None:
    recording = Recording()
    outbox = recording.outbox
    outbox.train("a", ORDER, 0.0)
    outbox.train("b", replace(ORDER, update_id="b/1"), 0.0)
    assert recording.held == []
    outbox.train("a", replace(ORDER, update_id="a/2", round=2, base_version=4), 0.0)
    outbox.evaluate("a", EvaluateModel(5), 0.0)
    assert recording.held == [("a", 0), ("a", 4)]
    outbox.repeat(outbox.waiting[0], "a", 0.0)
    assert len(recording.held) == 2, "the silo has said what it holds"


def test_a_question_about_masks_waits_a_minute_and_not_for_who_is_gone() -> None:
    recording = Recording()
    recording.outbox.questions(7.0)
    assert [(sent.node, sent.due_s) for sent in recording.outbox.waiting] == [(1, 67.0)]
    assert recording.given_up == ["gone"]
