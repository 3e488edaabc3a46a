"""Own progress that is carried on: the same after kill -9, whatever travels."""

from pathlib import Path

import numpy as np
import pytest

from fedsync.config.run_spec import RunSpec
from fedsync.config.strategy import StrategyConfig
from fedsync.core.layout import Vector
from fedsync.core.orders import WorkOrder
from fedsync.trainer.protocol import Collect, Identity, Train, exchange
from fedsync.trainer.service import TrainerService

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
