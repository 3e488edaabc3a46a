"""Small things to train, and a clock that only moves when told."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fedsync.core.orders import WorkOrder
from fedsync.tasks.task_protocol import Batch, SiloData, SiloSlot, Task
from fedsync.train import local_trainer as local
from fedsync.train import loop, order_clock
from fedsync.train.loop import Trainer
from fedsync.train.options import LocalOptions

EXAMPLES = 40


class TwoClasses(Task):
    """Points in four dimensions, labelled by the sign of their sum; each silo draws its own."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

    def data(self, slot: SiloSlot) -> SiloData:
        generator = torch.Generator().manual_seed(slot.index)
        inputs = torch.randn(EXAMPLES + 10, 4, generator=generator)
        labels = (inputs.sum(dim=1) > 0).long()
        return SiloData(
            TensorDataset(inputs[:EXAMPLES], labels[:EXAMPLES]), TensorDataset(inputs[EXAMPLES:], labels[EXAMPLES:])
        )


class Dropping(TwoClasses):
    """The same with a network that draws random numbers while it trains."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2))


class Cramped(TwoClasses):
    """The same on a machine whose memory ends at ``fits`` samples; remembers the sizes that it was asked."""

    def __init__(self, fits: int, message: str = "") -> None:
        self.fits = fits
        self.message = message
        self.asked: list[int] = []

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        size = len(batch[0])
        self.asked.append(size)
        if size > self.fits:
            raise RuntimeError(self.message) if self.message else torch.OutOfMemoryError("out of memory")
        return super().loss(model, batch)


class Clock:
    """Stands in for the trainer's clock: each local step takes ``step_s``, sleeps ``late_s`` too long."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step_s: float, late_s: float = 0.0) -> None:
        self.now_s = 100.0
        self.slept_s: list[float] = []
        self._late_s = late_s
        gradients = Trainer._gradients

        def stepping(trainer: Trainer, rows: Any) -> Tensor:
            self.now_s += step_s
            return gradients(trainer, rows)

        monkeypatch.setattr(Trainer, "_gradients", stepping)
        for module in (local, loop, order_clock):
            monkeypatch.setattr(module, "perf_counter", lambda: self.now_s)
        monkeypatch.setattr(order_clock, "sleep", self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds + (self._late_s if seconds else 0.0)


def slot(index: int = 0, seed: int = 7) -> SiloSlot:
    return SiloSlot(f"silo-{index}", index, 3, seed)


def trainer(task: Task | None = None, index: int = 0, options: LocalOptions | None = None) -> Trainer:
    return Trainer(task or TwoClasses(), slot(index), options or LocalOptions(device="cpu"))


def order(
    batch_size: int = 8,
    max_steps: int = 5,
    learning_rate: float = 0.1,
    seed: int = 1,
    budget_s: float | None = None,
    evaluate: bool = False,
) -> WorkOrder:
    return WorkOrder("u1", 3, 1, batch_size, max_steps, learning_rate, seed, budget_s, evaluate=evaluate)
