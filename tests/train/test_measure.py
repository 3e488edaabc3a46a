"""The machine is one whose steps take what a curve says; its clock moves with its steps only."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fedsync.common.errors import ConfigError
from fedsync.core.speed.curve import Curve
from fedsync.tasks.task_protocol import SiloData, SiloSlot
from fedsync.train import local_trainer as local
from fedsync.train import loop, order_clock
from fedsync.train.loop import Trainer
from fedsync.train.machine import measure as measuring
from fedsync.train.machine.measure import Measurement, StepTiming, measure, sizes_up_to
from tests.train.make import EXAMPLES, Cramped, TwoClasses, trainer

Machine = Callable[[Callable[[int], float]], None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Sets how long a step of so many samples takes."""

    def build(step_s: Callable[[int], float]) -> None:
        now_s = 0.0
        gradients = Trainer._gradients

        def stepping(trainer: Trainer, rows: Tensor) -> Tensor:
            nonlocal now_s
            now_s += step_s(len(rows))
            return gradients(trainer, rows)

        monkeypatch.setattr(Trainer, "_gradients", stepping)
        for module in (local, loop, measuring, order_clock):
            monkeypatch.setattr(module, "perf_counter", lambda: now_s)

    return build


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (40, [1, 2, 4, 8, 16, 32, 40])],
)
def test_sizes_double_up_to_the_last(most: int, sizes: list[int]) -> None:
    assert sizes_up_to(most) == sizes


@pytest.mark.parametrize(
    "curve", [Curve(2000.0), Curve(2000.0, launch_s=0.004), Curve(2000.0, launch_s=0.004, saturation=12)]
)
def test_the_curve_of_a_quiet_machine_is_found(machine: Machine, curve: Curve) -> None:
    machine(curve.step_s)
    measured = measure(trainer(), limit_s=1000.0, repeats=2)
    found = measured.fit()
    assert [timing.batch for timing in measured.timings] == sizes_up_to(EXAMPLES)
    for timing in measured.timings:
        assert timing.seconds == pytest.approx([curve.step_s(timing.batch)] * 2)
        assert found.step_s(timing.batch) == pytest.approx(curve.step_s(timing.batch), rel=0.01)
    assert found.speed == pytest.approx(curve.speed, rel=0.01)
    assert measured.memory_samples is None


def test_a_busy_while_is_shared_by_all_sizes(machine: Machine) -> None:
    calls: list[int] = []

    def step_s(batch: int) -> float:
        calls.append(batch)
        return 0.1  # an order is one step

    machine(step_s)
    measure(trainer(), limit_s=1000.0, repeats=3)
    sizes = sizes_up_to(EXAMPLES)
    assert calls[-3 * len(sizes) :] == sizes * 3


def test_short_steps_are_timed_many_at_once(machine: Machine) -> None:
    machine(lambda batch: 0.001 * batch)
    measured = measure(trainer(), limit_s=1000.0, repeats=1)
    # 50 ms of steps, at least one.
    assert {timing.batch: timing.steps for timing in measured.timings} == pytest.approx(
        {1: 50, 2: 25, 4: 13, 8: 7, 16: 4, 32: 2, 40: 2}
    )


def test_time_ends_growth_and_repeats_but_not_before_each_size_was_timed(machine: Machine) -> None:
    machine(lambda batch: 1.0)
    seen: list[tuple[int, float]] = []
    measured = measure(trainer(), limit_s=10.0, repeats=9, watch=lambda batch, gone: seen.append((batch, gone)))
    # Four steps try a size: after two sizes 8 of 10 s are gone, and two timings fill the rest.
    assert [(timing.batch, len(timing.seconds)) for timing in measured.timings] == [(1, 1), (2, 1)]
    assert [batch for batch, _ in seen] == [1, 2, 1, 2]
    assert all(earlier <= later <= 1 for (_, earlier), (_, later) in pairwise(seen))


def test_memory_ends_growth_and_is_told(machine: Machine) -> None:
    machine(lambda batch: 0.01)
    measured = measure(trainer(Cramped(9)), limit_s=1000.0, repeats=1)
    # 16 do not fit, 8 do.
    assert [timing.batch for timing in measured.timings] == [1, 2, 4, 8]
    assert measured.memory_samples == 8


def test_a_machine_short_of_memory_is_not_filled(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(lambda batch: 0.01)
    monkeypatch.setattr(measuring, "machine_memory_share", lambda: 0.95)
    assert [timing.batch for timing in measure(trainer(), 1000.0, 1).timings] == [1, 2]


class Normalised(TwoClasses):
    """A network that refuses a single sample."""

    def __init__(self, examples: int = EXAMPLES) -> None:
        self.examples = examples

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))

    def data(self, slot: SiloSlot) -> SiloData:
        data: Any = super().data(slot)
        return SiloData(TensorDataset(*(tensor[: self.examples] for tensor in data.train.tensors)), data.test)


def test_a_model_that_refuses_one_sample_is_timed_from_two_on(machine: Machine) -> None:
    machine(lambda batch: 0.01)
    assert [timing.batch for timing in measure(trainer(Normalised(5)), 1000.0, 1).timings] == [2, 4, 5]
    assert trainer(Normalised(5)).find_batch_cap() is None
    with pytest.raises(ConfigError, match="cannot be trained on a single sample"):
        measure(trainer(Normalised(1)), 1000.0, 1)


def test_one_size_makes_a_line() -> None:
    assert Measurement((StepTiming(4, 1, (0.1, 0.4, 0.2)),), None).fit() == Curve(20.0)


def test_on_a_gpu_memory_is_searched_first(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(lambda batch: 0.01)
    monkeypatch.setattr(Trainer, "device", "cuda:0")
    task = Cramped(9)
    measured = measure(trainer(task), 1000.0, 1)
    assert [timing.batch for timing in measured.timings] == [1, 2, 4, 8, 9]
    assert measured.memory_samples == 9
