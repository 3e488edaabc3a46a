"""The order of a trainer, and another that comes: which one ends, which one begins, and whose answer is kept."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsync.common.errors import Hanging, ProtocolError
from fedsync.config.run_spec import RunSpec
from fedsync.config.strategy import StrategyConfig
from fedsync.core.orders import WorkOrder, WorkReport
from fedsync.model.transfer import OtherVersion, Payload, VersionMismatch
from fedsync.silo.protocol import Completed, EvaluateModel, Identity, InProgress, Train, exchange
from fedsync.silo.session.current_order import CurrentOrder, OrderJob
from fedsync.silo.session.service import TrainerService
from fedsync.silo.session.session import SiloSession

MODEL = np.zeros(1, np.float32)
LONG_S = 20.0


def order(name: str, seed: int = 1) -> WorkOrder:
    return WorkOrder(name, 0, 1, 16, 9, 0.1, seed)


class Silo:
    """Trains when it is told to: a step for each time, nine at most."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.accepted: list[str] = []
        self.fails: dict[str, Exception] = {}
        self._steps = threading.Semaphore(0)
        self._begun = threading.Condition()
        self.current = CurrentOrder(self.train, None)

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
        return self.current.enter(asked, MODEL, lambda again: self.accepted.append(asked.update_id))

    def at_work(self, name: str) -> OrderJob:
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
    made.current.wait()


@pytest.mark.parametrize("halted", [False, True], ids=["whole", "halted"])
def test_an_order_is_trained_once_and_its_answer_is_there_until_the_next_order(silo: Silo, halted: bool) -> None:
    first = silo.at_work("a")
    assert first.reply(0) == (InProgress(0, 0), None) and silo.current.busy
    assert silo.enter(order("a")) is first and silo.accepted == ["a"], "asked again it is the same"
    if halted:
        first.halt.set()
    silo.step(1 if halted else 9)
    assert silo.steps_of(first) == (1 if halted else 9) and not silo.current.busy
    assert silo.enter(order("a")) is silo.current.find("a") is first and silo.accepted == ["a"]
    silo.enter(order("b"))
    assert silo.begins("a", "b") and silo.current.find("a") is None


def test_a_new_order_ends_the_one_in_work_and_what_has_not_begun_never_begins(silo: Silo) -> None:
    """So whatever the server sends, a silo has one order in work and one that waits for its end."""
    first, second, third = silo.at_work("a"), silo.enter(order("b")), silo.enter(order("c"))
    assert third.reply(0) == (InProgress(0, 0), None), "it is there, and asked for it says so"
    silo.step(1)
    assert silo.begins("a", "c") and silo.steps_of(first) == 1
    with pytest.raises(ProtocolError, match="given up before it began"):
        second.reply(LONG_S)
    assert silo.current.busy and silo.current.find("a") is silo.current.find("b") is None
    silo.step(9)
    assert silo.steps_of(third) == 9 and not silo.current.busy


def test_what_its_owner_does_not_take_does_not_begin_and_ends_nothing(silo: Silo) -> None:
    first = silo.at_work("a")

    def refuses(again: bool) -> None:
        raise ProtocolError("owner", "limit", "an order too many")

    with pytest.raises(ProtocolError, match="too many"):
        silo.current.enter(order("b"), MODEL, refuses)
    assert silo.current.find("b") is None and silo.current.find("a") is first
    silo.step(9)
    assert silo.steps_of(first) == 9 and silo.began == ["a"]


def test_an_order_whose_payload_did_not_fit_begins_again_and_one_that_failed_does_not(silo: Silo) -> None:
    silo.fails = {"a": OtherVersion(3, 4), "b": RuntimeError("out of memory")}
    refused = silo.enter(order("a"))
    silo.step(9)
    assert refused.reply(LONG_S)[0] == VersionMismatch(3)
    again = silo.enter(order("a"))
    silo.step(9)
    assert again is not refused and silo.steps_of(again) == 9
    failing = silo.enter(order("b"))
    silo.step(9)
    with pytest.raises(RuntimeError, match="out of memory"):
        failing.reply(LONG_S)
    assert silo.enter(order("b")) is failing, "asked again it says the same"
    assert silo.began == ["a", "a", "b"]


def test_an_order_of_the_same_name_that_says_something_else_is_another(silo: Silo) -> None:
    before = silo.at_work("a")
    after = silo.enter(order("a", seed=2))
    silo.step(1)
    assert silo.steps_of(before) == 1 and silo.current.find("a") is after


@pytest.mark.parametrize("waits", [False, True], ids=["alone", "another waits"])
def test_what_hangs_fails_and_what_waits_for_it_is_to_be_sent_again(silo: Silo, waits: bool) -> None:
    stuck = silo.at_work("a/1")
    other = silo.enter(order("a/2")) if waits else stuck
    assert stuck.given_up is waits
    silo.current.hang(stuck, Hanging("it waits"), holds=7)
    assert not silo.current.busy
    if waits:
        assert other.reply(0.0) == (VersionMismatch(7), None)
    silo.step(9)
    for wait_s in (0.0, 0.1):  # whatever still comes of it
        with pytest.raises(Hanging, match="it waits"):
            stuck.reply(wait_s)


def test_a_model_is_evaluated_after_the_order_that_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its payload continues the version that the order brings."""
    go_on, seen = threading.Event(), list[str]()
    spec = RunSpec.of(StrategyConfig.load("fedavg", ["task={kind: digits}"]), None, 1)
    service = TrainerService(Identity(spec.dump(), 0, "a", resources=False), tmp_path)
    train, evaluate = SiloSession.train, SiloSession.evaluate

    def trains(session: SiloSession, order: WorkOrder, *rest: Any) -> Completed:
        assert go_on.wait(60)
        seen.append(order.update_id)
        return train(session, order, *rest)

    def evaluates(session: SiloSession, *rest: Any) -> Any:
        seen.append("evaluation")
        return evaluate(session, *rest)

    monkeypatch.setattr(SiloSession, "train", trains)
    monkeypatch.setattr(SiloSession, "evaluate", evaluates)
    model = service._session.initial_model()
    exchange(service.ask, Train(WorkOrder("a/1", 0, 1, 8, 2, 0.1, 1), 0.0), model)
    asks = threading.Thread(target=exchange, args=(service.ask, EvaluateModel(1), model), daemon=True)
    asks.start()
    asks.join(0.2)
    assert seen == []
    go_on.set()
    asks.join(60)
    assert seen == ["a/1", "evaluation"]
