"""Orders at a trainer, one in work and one queued: who begins when, what is kept, what a lying server cannot have."""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from fedsync.common.errors import Hanging, ProtocolError
from fedsync.core.orders import WorkOrder, WorkReport
from fedsync.model.transfer import OtherVersion, Payload, VersionMismatch
from fedsync.silo.protocol import Completed, InProgress
from fedsync.silo.session.order_queue import OrderJob, OrderQueue

MODEL = np.zeros(1, np.float32)
LONG_S = 20.0


def order(name: str, behind: str = "", seed: int = 1) -> WorkOrder:
    return WorkOrder(name, 0, 1, 16, 9, 0.1, seed, behind=behind)


class Silo:
    """Trains when it is told to: a step for each time, nine at most."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.accepted: list[str] = []
        self.fails: dict[str, Exception] = {}
        self._steps = threading.Semaphore(0)
        self._begun = threading.Condition()
        self.queue = OrderQueue(self.train, ())

    def train(self, job: OrderJob, received: Payload) -> Completed:
        asked, watch = job.order, job.watch
        with self._begun:
            self.began.append(asked.update_id)
            self._begun.notify_all()
        steps, going = 0, True
        while steps < asked.max_steps and going:
            assert self._steps.acquire(timeout=LONG_S)
            steps += 1
            going = watch(steps, steps * asked.batch_size)
        if asked.update_id in self.fails:
            raise self.fails.pop(asked.update_id)
        return Completed(WorkReport(0, steps, steps * 16, 1.0, 0.0), received)

    def enter(self, asked: WorkOrder) -> OrderJob:
        return self.queue.enter(asked, MODEL, lambda again: self.accepted.append(asked.update_id))

    def at_work(self, name: str) -> OrderJob:
        """An order that has begun."""
        job = self.enter(order(name))
        assert self.begins(name)
        return job

    def step(self, steps: int) -> None:
        self._steps.release(steps)

    def begins(self, *names: str) -> bool:
        """Whether exactly these begin, in this order, before long."""
        with self._begun:
            return self._begun.wait_for(lambda: self.began == list(names), LONG_S)

    def steps_of(self, job: OrderJob) -> int:
        """Those that an order has come to, once it is over."""
        reply: Any = job.reply(LONG_S)[0]
        assert isinstance(reply, WorkReport)
        return reply.steps


@pytest.fixture
def silo() -> Iterator[Silo]:
    made = Silo()
    yield made
    made.step(1000)
    made.queue.wait()


@pytest.mark.parametrize("halted", [False, True], ids=["whole", "halted"])
def test_a_queued_order_begins_when_the_one_before_is_over_and_both_answers_are_there(silo: Silo, halted: bool) -> None:
    first, second = silo.at_work("a"), silo.enter(order("b", behind="a"))
    assert second.reply(0) == (InProgress(0, 0), None), "it is there, and asked for it says so"
    assert silo.enter(order("b", behind="a")) is second and silo.accepted == ["a", "b"], "asked again it is the same"
    if halted:
        first.halt.set()
    silo.step(1 if halted else 9)
    assert silo.begins("a", "b") and silo.steps_of(first) == (1 if halted else 9)
    silo.step(9)
    assert silo.steps_of(second) == 9 and silo.queue.find("a") is first
    silo.enter(order("c", behind="b"))
    assert silo.queue.find("a") is None and silo.queue.find("b") is second and silo.begins("a", "b", "c")


def test_what_was_given_up_ends_and_what_was_queued_behind_it_never_begins(silo: Silo) -> None:
    first, second = silo.at_work("a"), silo.enter(order("b", behind="a"))
    other = silo.enter(order("c"))
    silo.step(1)
    assert silo.begins("a", "c") and silo.steps_of(first) == 1
    with pytest.raises(ProtocolError, match="given up before it began"):
        second.reply(LONG_S)
    assert silo.queue.busy and silo.queue.find("a") is silo.queue.find("b") is None
    silo.step(9)
    assert silo.steps_of(other) == 9 and not silo.queue.busy


def test_an_order_that_is_overtaken_by_the_one_behind_it_is_trained_after_that(silo: Silo) -> None:
    late_first = silo.enter(order("b", behind="a"))
    assert silo.begins("b"), "what it is behind may have been lost on its way"
    overtaken = silo.enter(order("a"))
    silo.step(18)
    assert silo.begins("b", "a") and (silo.steps_of(late_first), silo.steps_of(overtaken)) == (9, 9)


def test_a_silo_has_two_orders_at_most(silo: Silo) -> None:
    """One in work and one queued; what goes beyond that is refused and changes nothing, or gives something up."""
    silo.at_work("a")
    second = silo.enter(order("b", behind="a"))
    with pytest.raises(ProtocolError, match="'x' would be the third"):
        silo.enter(order("x", behind="a"))
    assert silo.accepted == ["a", "b"] and silo.queue.find("b") is second
    silo.enter(order("c", behind="b"))  # the server has the first, or has given it up
    silo.step(1)
    assert silo.begins("a", "b")
    silo.step(9)
    assert silo.begins("a", "b", "c")


def test_what_its_owner_does_not_take_is_not_queued_and_ends_nothing(silo: Silo) -> None:
    first = silo.at_work("a")

    def refuses(again: bool) -> None:
        raise ProtocolError("owner", "limit", "an order too many")

    for refused in (order("b", behind="a"), order("c")):
        with pytest.raises(ProtocolError, match="too many"):
            silo.queue.enter(refused, MODEL, refuses)
        assert silo.queue.find(refused.update_id) is None
    silo.step(9)
    assert silo.steps_of(first) == 9


def test_an_order_cannot_have_one_before_it_and_another_behind(silo: Silo) -> None:
    silo.enter(order("c", behind="b"))
    silo.enter(order("b", behind="a"))
    with pytest.raises(ProtocolError, match="'a' would be the third"):
        silo.enter(order("a", behind="c"))


def test_an_order_that_fails_or_is_refused_lets_the_one_behind_it_begin_and_comes_again(silo: Silo) -> None:
    silo.fails = {"a": OtherVersion(3, 4), "b": RuntimeError("out of memory")}
    refused, failing = silo.enter(order("a")), silo.enter(order("b", behind="a"))
    silo.step(18)
    assert refused.reply(LONG_S)[0] == VersionMismatch(3)
    with pytest.raises(RuntimeError, match="out of memory"):
        failing.reply(LONG_S)
    assert silo.enter(order("b", behind="a")) is failing, "asked again it says the same"
    again = silo.enter(order("a"))
    silo.step(9)
    assert again is not refused and silo.steps_of(again) == 9 and silo.began == ["a", "b", "a"]


def test_an_order_of_the_same_name_that_says_something_else_is_another(silo: Silo) -> None:
    before = silo.at_work("a")
    after = silo.enter(order("a", seed=2))
    silo.step(1)
    assert silo.steps_of(before) == 1 and silo.queue.find("a") is after


@pytest.mark.parametrize("queued", [False, True], ids=["given up", "queued behind"])
def test_what_hangs_fails_and_what_waits_for_it_is_to_be_sent_again(silo: Silo, queued: bool) -> None:
    stuck = silo.at_work("a/1")
    other = silo.enter(order("a/2", behind="a/1" if queued else ""))
    assert stuck.given_up is not queued
    silo.queue.hang(stuck, Hanging("it waits"), holds=7)
    assert other.reply(0.0) == (VersionMismatch(7), None)
    if queued:
        assert not silo.queue.busy
        silo.step(9)
        for wait_s in (0.0, 0.1):  # whatever still comes of it
            with pytest.raises(Hanging, match="it waits"):
                stuck.reply(wait_s)
