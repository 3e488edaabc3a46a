"""What one order of a large model takes at its silo, beyond the model that trains."""

from pathlib import Path

import numpy as np
import pytest

import bench.cost.large_model
from fedsync.config.run_spec import RunSpec
from fedsync.config.strategy import StrategyConfig
from fedsync.core.orders import Evaluation, WorkOrder
from fedsync.model.chunked_arrays import SPAN_BYTES, file_part, map_file
from fedsync.model.layout import Vector
from fedsync.model.plain_wire import Bf16, Fp16, Int8, WireFormat
from fedsync.silo.protocol import Collect, EvaluateModel, Identity, Train, exchange
from fedsync.silo.session.service import TrainerService
from tests.memory import traced

PARAMETERS = 2_000_000
ORDER = WorkOrder("a/1", 1, 0, 8, 1, 0.1, seed=3)


def made(folder: Path, *settings: str) -> TrainerService:
    task = f"task={{kind: custom, file: {bench.cost.large_model.__file__}, options: {{parameters: {PARAMETERS}}}}}"
    spec = RunSpec.of(StrategyConfig.load("fedavg", [task, *settings]), None, 2)
    return TrainerService(Identity(spec.dump(), 0, "a"), folder)


@pytest.fixture
def service(tmp_path: Path) -> TrainerService:
    return made(tmp_path)


@pytest.fixture
def received(service: TrainerService, tmp_path: Path) -> Vector:
    """A model as the server sends it, in a file."""
    (tmp_path / "received").write_bytes(service._session.initial_model().tobytes())
    return map_file(tmp_path / "received")


def test_an_order_takes_its_update_and_no_more(service: TrainerService, received: Vector) -> None:
    with traced() as taken:
        report, update = exchange(service.ask, Train(ORDER), received)
    assert update is not None and update.nbytes == 4 * PARAMETERS
    assert taken.peak < update.nbytes + 4 * SPAN_BYTES
    assert taken.left < SPAN_BYTES, "the update is in the file of the last order"
    assert file_part(update) is not None
    again = exchange(service.ask, Collect(ORDER.update_id))
    assert again[0] == report
    np.testing.assert_array_equal(again[1], update)


@pytest.mark.slow
@pytest.mark.parametrize("wire", [Bf16(), Fp16(), Int8()], ids=["bf16", "fp16", "int8"])
def test_an_order_takes_no_more_memory_for_fewer_bits(wire: WireFormat, received: Vector, tmp_path: Path) -> None:
    """The update becomes what is owed in its own memory, and what travels a file, span by span."""
    silo = made(tmp_path / "silo", f"wire={{up: {type(wire).__name__.lower()}}}")
    with traced() as taken:
        _, update = exchange(silo.ask, Train(ORDER), received)
    assert update is not None and update.nbytes == wire.payload_bytes(PARAMETERS)
    assert taken.peak < 4 * PARAMETERS + 8 * SPAN_BYTES
    assert taken.left < SPAN_BYTES and file_part(update) is not None


def test_an_evaluation_takes_next_to_nothing(service: TrainerService, received: Vector) -> None:
    with traced() as taken:
        reply, _ = exchange(service.ask, EvaluateModel(1), received)
    assert isinstance(reply, Evaluation)
    assert taken.peak < 2 * SPAN_BYTES
