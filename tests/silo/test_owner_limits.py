"""What a silo's owner says that orders may ask: how small they may be, how many there are, when they are taken."""

import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsync.common.errors import ConfigError, LimitReached
from fedsync.common.sandbox.path_sandbox import ALLOWED
from fedsync.config.run_spec import RunSpec
from fedsync.config.sections.presence import PresenceConfig
from fedsync.config.silo_start import LimitsConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.orders import Evaluation, Presence, Split, WorkOrder, WorkReport
from fedsync.model.layout import Vector, as_vector
from fedsync.model.transfer import OtherVersion, VersionMismatch
from fedsync.silo.owner import owner_policy
from fedsync.silo.owner.key_lookup import KEYS
from fedsync.silo.owner.owner_policy import OrderCounts, OwnerPolicy
from fedsync.silo.protocol import (
    AskModel,
    Collect,
    Describe,
    EvaluateModel,
    Hello,
    Identity,
    InitialModel,
    Refusal,
    Refused,
    Request,
    Train,
    exchange,
)
from fedsync.silo.session.service import TrainerService
from fedsync.silo.session.session import SiloSession
from fedsync.train.loop import Trainer
from fedsync.train.silo_trainer import Outcome

SPEC = RunSpec.of(StrategyConfig.load("fedavg"), None, 3)


def order(
    serial: int = 1, batch_size: int = 8, max_steps: int = 2, *, evaluate: bool = False, **more: Any
) -> WorkOrder:
    return WorkOrder(f"a/{serial}", 0, serial, batch_size, max_steps, 0.1, 1, evaluate=evaluate, **more)


def limited(folder: Path, **limits: int) -> OwnerPolicy:
    return OwnerPolicy(limits=LimitsConfig(**limits), counts=str(folder / "orders.json"))


@pytest.mark.parametrize(
    ("asked", "limit"),
    [
        (order(batch_size=3), "batch_size: an order of 3, and this silo's owner demands at least 4"),
        (order(batch_size=4, max_steps=3), "samples: an order of 12, and this silo's owner demands at least 16"),
    ],
)
def test_an_order_that_is_too_small_is_refused_and_not_counted(asked: WorkOrder, limit: str, tmp_path: Path) -> None:
    owner = limited(tmp_path, batch_size=4, samples=16, orders_per_hour=1)
    with pytest.raises(LimitReached, match=limit):
        owner.begin(asked)
    owner.begin(order(batch_size=4, max_steps=4))


def test_orders_are_counted_over_runs_and_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1e9
    monkeypatch.setattr(time, "time", lambda: now_s)
    for serial in range(3):
        limited(tmp_path, orders_per_hour=3).begin(order(serial))  # a trainer of another run each
        now_s += 60
    with pytest.raises(LimitReached, match=r"3 orders within an hour.*limits\.orders_per_hour"):
        limited(tmp_path, orders_per_hour=3).begin(order())
    now_s -= 7200  # a clock that is set back gives no orders
    with pytest.raises(LimitReached):
        limited(tmp_path, orders_per_hour=3).begin(order())
    now_s += 7200 + 3600
    limited(tmp_path, orders_per_hour=3).begin(order())


def test_an_order_that_evaluates_counts_as_an_evaluation_too(tmp_path: Path) -> None:
    owner = limited(tmp_path, evaluations_per_hour=2)
    owner.begin(order(evaluate=True))
    owner.begin_evaluation()
    for asked in (owner.begin_evaluation, lambda: owner.begin(order(2, evaluate=True))):
        with pytest.raises(LimitReached, match="2 evaluations"):
            asked()
    owner.begin(order(2))


@pytest.mark.parametrize("text", ["", "[]", "{", '{"orders": {"x": 1}}', '{"orders": {"1": "1"}}', '{"orders": 3}'])
def test_counts_that_are_damaged_are_not_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "orders.json").write_text(text)
    with pytest.raises(ConfigError, match="damaged: the number of past orders is unknown"):
        OrderCounts(tmp_path / "orders.json", {"orders": 1}).take("orders")


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainerService:
    """Of a silo whose owner allows two orders an hour, of 12 samples at least."""
    allowed = limited(tmp_path, samples=12, orders_per_hour=2, evaluations_per_hour=1)
    monkeypatch.setenv(ALLOWED, allowed.model_dump_json())
    monkeypatch.delenv(KEYS, raising=False)
    return TrainerService(Identity(SPEC.dump(), 0, "a"))


@pytest.fixture
def vector(service: TrainerService) -> Vector:
    reply, model = exchange(service.ask, AskModel())
    assert isinstance(reply, InitialModel) and model is not None
    return as_vector(model, reply.layout, "a")


def test_a_trainer_holds_to_the_limits(service: TrainerService, vector: Vector) -> None:
    hello, _ = exchange(service.ask, Describe())
    assert isinstance(hello, Hello) and (hello.facts.least_batch, hello.facts.least_samples) == (1, 12)

    def code(asked: WorkOrder) -> Refusal | None:
        answer, _ = exchange(service.ask, Train(asked), vector)
        return answer.code if isinstance(answer, Refused) else None

    assert code(order(1)) is None
    assert code(order(1)) is None, "the same again is no other order"
    assert code(order(2, batch_size=8, max_steps=1)) is Refusal.LIMIT, "too small"
    assert code(order(3, batch_size=4, max_steps=9, budget_s=1e-9)) is Refusal.LIMIT, "out of time after one step"
    assert code(order(4)) is Refusal.LIMIT, "the third"


def test_what_begins_again_with_another_payload_counts_once(
    service: TrainerService, vector: Vector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first payload continued a version that the silo does not hold; of the evaluations, one an hour is allowed."""
    receive, refusing = SiloSession.receive, [True]

    def other(self: SiloSession, *arguments: Any) -> Any:
        refusing[0] = not refusing[0]
        if not refusing[0]:
            raise OtherVersion(-1, 3)
        return receive(self, *arguments)

    monkeypatch.setattr(SiloSession, "receive", other)

    def codes(request: Request) -> list[object]:
        found = [exchange(service.ask, request, vector)[0] for _ in range(2)]
        return [each.code if isinstance(each, Refused) else type(each) for each in found]

    for serial in (1, 2):
        assert codes(Train(order(serial))) == [VersionMismatch, WorkReport]
    assert codes(Train(order(3))) == [Refusal.LIMIT, Refusal.LIMIT]
    assert codes(EvaluateModel(0)) == [VersionMismatch, Evaluation]
    assert codes(EvaluateModel(0, Split.TEST)) == [Refusal.LIMIT, Refusal.LIMIT]


def test_a_trainer_says_how_long_its_silo_is_there(
    service: TrainerService, vector: Vector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Durations: a window from 22:00 to 06:00, at 05:00 and at 07:00. Other silos say nothing of it."""
    hello, _ = exchange(service.ask, Describe())
    assert isinstance(hello, Hello) and hello.facts.presence is None
    window = PresenceConfig(begin="22:00", until="06:00", zone="UTC")
    monkeypatch.setenv(ALLOWED, OwnerPolicy(presence=window).model_dump_json())
    monkeypatch.setattr(owner_policy, "utc_now", lambda: datetime(2026, 1, 11, 5, tzinfo=UTC))
    nightly = TrainerService(Identity(SPEC.dump(), 0, "a"))
    hello, _ = exchange(nightly.ask, Describe())
    assert isinstance(hello, Hello) and hello.facts.presence == Presence(3600.0, 17 * 3600.0)
    done, _ = exchange(nightly.ask, Train(order(1)), vector)
    assert isinstance(done, WorkReport) and done.presence == Presence(3600.0, 17 * 3600.0)
    monkeypatch.setattr(owner_policy, "utc_now", lambda: datetime(2026, 1, 11, 7, tzinfo=UTC))
    again, _ = exchange(nightly.ask, Collect(order(1).update_id))
    assert isinstance(again, WorkReport) and again.presence == Presence(0.0, 15 * 3600.0), "as it is when it speaks"
    refused, _ = exchange(nightly.ask, Train(order(2)), vector)
    assert refused == Refused(Refusal.AWAY, refused.text if isinstance(refused, Refused) else "", 15 * 3600.0)


def test_a_halted_order_goes_on_until_enough_samples_are_in_it(service: TrainerService, vector: Vector) -> None:
    exchange(service.ask, Train(order(1, batch_size=4, max_steps=10**6), 0.0), vector)
    report, _ = exchange(service.ask, Collect("a/1", None, halt=True))
    assert report.samples >= 12  # type: ignore[union-attr]
    assert np.isfinite(report.loss)  # type: ignore[union-attr]


def test_an_order_that_only_scores_ends_with_the_samples_that_the_owner_demands_and_changes_nothing(
    service: TrainerService, vector: Vector, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Trainer.run

    def drifting(self: Trainer, *arguments: Any, **options: Any) -> Outcome:
        """As running means do, whatever the learning rate."""
        outcome = run(self, *arguments, **options)
        return replace(outcome, update=outcome.update + np.float32(1))

    monkeypatch.setattr(Trainer, "run", drifting)
    asked = replace(order(1, batch_size=4, max_steps=10**6, evaluate=True), learning_rate=0.0)
    report, update = exchange(service.ask, Train(asked), vector)
    assert report.samples == 12 and report.evaluation is not None  # type: ignore[union-attr]
    assert update is not None and not update.view(np.float32).any()
