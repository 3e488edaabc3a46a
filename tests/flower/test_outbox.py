"""What the server has sent: marks on orders, and answers to what is forgotten."""

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedsync.core.errors import ProtocolError
from fedsync.core.orders import WorkOrder
from fedsync.flower import messages
from fedsync.flower.internals.pull import Arrival
from fedsync.flower.nodes import Nodes
from fedsync.flower.outbox import Outbox, PendingMessage
from fedsync.flower.timeouts import Timeouts
from fedsync.trainer.protocol import Answer, AskModel, AskSnapshot, Describe, EvaluateModel, Question, Request, Train
from tests.flower import grid
from tests.flower.grid import DirectGrid, run_identity, saying

ORDER = WorkOrder(update_id="a/1", base_version=0, round=1, batch_size=8, max_steps=1, learning_rate=0.1, seed=0)
SMALL = 2**20
SILENT: grid.Answer = lambda message, context: None  # noqa: E731


@pytest.fixture(autouse=True)
def _identity() -> Iterator[None]:
    with run_identity():
        yield


@pytest.fixture
def outbox() -> Outbox:
    """To one silo that never answers, and stands for an aggregator that has nothing to send."""
    silent, nodes = DirectGrid(1, {1: SILENT}), Nodes(DirectGrid(0))
    nodes.by_name["a"] = 1
    aggregator: Any = SimpleNamespace(outgoing=lambda silo: np.zeros(1, np.uint8), upload_bytes=10)
    return Outbox(silent, nodes, "{}", Timeouts(ask_s=10.0), 0.0, aggregator, 10)


@pytest.mark.parametrize("flushed", [False, True])
def test_an_order_is_halted_on_its_way_and_before(outbox: Outbox, flushed: bool) -> None:
    outbox.train("a", ORDER, 0.0)
    outbox.evaluate("a", 3, 0.0)
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


def test_an_order_that_has_no_answer_is_collected(outbox: Outbox) -> None:
    outbox.train("a", ORDER, 0.0)
    outbox.flush()
    (sent,) = outbox.unanswered(10.0)
    outbox.ask_again(sent, 10.0)
    assert [sent.collecting for sent in outbox.waiting] == [False, True]
    assert all(sent.request == Train(ORDER, 0.0) for sent in outbox.waiting), "both have the order's answer"


@pytest.mark.parametrize(
    ("request_", "nbytes"),
    [
        (Train(ORDER), 10),
        (AskSnapshot(), 10 + SMALL),
        (AskModel(), 10 + SMALL),
        (EvaluateModel(3), SMALL),
        (Question(), SMALL),
        (Describe(), SMALL),
    ],
)
def test_an_answer_may_be_as_large_as_what_was_asked_for(outbox: Outbox, request_: Request, nbytes: int) -> None:
    """10 bytes for an update, and for a model."""
    sent = PendingMessage(1, request_, 0.0)
    for more in (0, 1):
        reply = saying(messages.request(1, "{}", request_, None, 1.0), Answer(), np.zeros(nbytes + more, np.uint8))
        with pytest.raises(ProtocolError, match="at most") if more else nullcontext():
            outbox.read(sent, Arrival("", reply))
