"""What the server has sent: marks on orders, and answers to what is forgotten."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fedsync.core.orders import WorkOrder
from fedsync.flower import messages
from fedsync.flower.outbox import Outbox, PendingMessage
from tests.flower.grid import Answer, DirectGrid, run_identity

ORDER = WorkOrder(update_id="a/1", base_version=0, round=1, batch_size=8, max_steps=1, learning_rate=0.1, seed=0)
SILENT: Answer = lambda message, context: None  # noqa: E731


@pytest.fixture(autouse=True)
def _identity() -> Iterator[None]:
    with run_identity():
        yield


@pytest.fixture
def mail() -> Outbox:
    """To one silo that never answers."""
    return Outbox(DirectGrid(1, {1: SILENT}), 10, 10)


def post(mail: Outbox, sent: PendingMessage) -> None:
    mail.post(sent, messages.query(sent.node, "{}", 1.0))


@pytest.mark.parametrize("flushed", [False, True])
def test_an_order_is_halted_on_its_way_and_before(mail: Outbox, flushed: bool) -> None:
    post(mail, PendingMessage(1, 1.0, order=ORDER))
    post(mail, PendingMessage(1, 1.0, version=3))
    if flushed:
        assert mail.flush() == []
    assert mail.halt("a/1")
    assert [sent.halt for sent in mail.waiting] == [True, False]


def test_an_order_that_nobody_was_sent_is_not_halted(mail: Outbox) -> None:
    post(mail, PendingMessage(1, 1.0, order=ORDER))
    assert not mail.halt("a/2")
    mail.forget(1)
    assert not mail.halt("a/1")
