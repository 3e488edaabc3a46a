"""Queued orders at a silo's trainer: own progress that is carried on, and when a model is evaluated."""

import threading
from pathlib import Path

import numpy as np
import pytest

from fedsync.config.run_spec import RunSpec
from fedsync.config.strategy import StrategyConfig
from fedsync.core.orders import WorkOrder
from fedsync.model.layout import Vector
from fedsync.silo.protocol import Collect, EvaluateModel, Identity, Train, exchange
from fedsync.silo.session.service import TrainerService
from fedsync.silo.session.session import SiloSession

ORDERS = [WorkOrder(f"a/{n}", 0, n, 8, 2, 0.1, n, behind=f"a/{n - 1}" if n > 1 else "", carry=0.5) for n in (1, 2, 3)]


def made(folder: Path, up: str) -> TrainerService:
    folder.mkdir(exist_ok=True)
    spec = RunSpec.of(StrategyConfig.load("fedavg", ["task={kind: digits}", f"wire={{up: {up}}}"]), None, 1)
    return TrainerService(Identity(spec.dump(), 0, "a", resources=False), folder)


def trained(silo: TrainerService, order: WorkOrder) -> Vector:
    update = exchange(silo.ask, Train(order), silo._session.initial_model())[1]
    assert update is not None
    return np.array(update)


@pytest.mark.parametrize("up", ["fp32", "bf16", "int8"])
def test_an_order_carries_on_what_the_one_before_has_brought_also_in_a_new_process(up: str, tmp_path: Path) -> None:
    straight = made(tmp_path / "straight", up)
    expected = [trained(straight, order) for order in ORDERS]
    for number, order in enumerate(ORDERS):
        np.testing.assert_array_equal(trained(made(tmp_path / "killed", up), order), expected[number])
    again = made(tmp_path / "killed", up)
    for order, update in zip(ORDERS[1:], expected[1:], strict=True):
        np.testing.assert_array_equal(exchange(again.ask, Collect(order.update_id))[1], update)


def test_what_is_carried_on_is_the_update_as_it_was_trained_however_it_travels(tmp_path: Path) -> None:
    found: dict[str, Vector] = {}
    for up in ("fp32", "bf16", "int8"):
        silo, form = made(tmp_path / up, up), StrategyConfig.load("fedavg", [f"wire={{up: {up}}}"]).wire.formats.up
        found[up] = [form.decode(trained(silo, order), 0, silo._session.layout.size) for order in ORDERS[:2]][1]
    without = made(tmp_path / "without", "fp32")
    plain = [trained(without, WorkOrder(f"a/{n}", 0, n, 8, 2, 0.1, n)) for n in (1, 2)][1].view(np.float32)
    carried = np.linalg.norm(found["fp32"] - plain)
    assert carried > 0, "nothing was carried on"
    for up in ("bf16", "int8"):
        assert np.linalg.norm(found[up] - found["fp32"]) < carried / 5


def test_a_model_is_evaluated_after_the_orders_that_are_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes with it continues what they bring, so it is not for a silo between two of them."""
    silo, go_on, seen = made(tmp_path / "silo", "fp32"), threading.Event(), list[str]()
    train, evaluate = SiloSession.train, SiloSession.evaluate

    def trains(session, order, *rest):  # type: ignore[no-untyped-def]
        assert go_on.wait(60)
        seen.append(order.update_id)
        return train(session, order, *rest)

    def evaluates(session, *rest):  # type: ignore[no-untyped-def]
        seen.append("evaluation")
        return evaluate(session, *rest)

    monkeypatch.setattr(SiloSession, "train", trains)
    monkeypatch.setattr(SiloSession, "evaluate", evaluates)
    model = silo._session.initial_model()
    for order in ORDERS[:2]:
        exchange(silo.ask, Train(order, 0.0), model)
    asks = threading.Thread(target=exchange, args=(silo.ask, EvaluateModel(2), model), daemon=True)
    asks.start()
    asks.join(0.2)
    go_on.set()
    asks.join(60)
    assert seen == ["a/1", "a/2", "evaluation"]
