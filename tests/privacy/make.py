"""Small things to train privately, and random numbers that a test chooses."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fedsync.core.orders import WorkOrder
from fedsync.privacy.release import PrivateSettings
from fedsync.tasks.task_protocol import Batch, SiloData, SiloSlot, Task
from fedsync.train.dp_sgd.private_trainer import PrivateTrainer
from fedsync.train.options import LocalOptions

INPUTS = torch.tensor([[3.0, 4.0], [0.0, 0.1], [-6.0, 8.0], [1.0, 0.0]])
TARGETS = torch.tensor([[1.0], [0.0], [2.0], [1.0]])


class Line(Task):
    """Regression of four points by a linear model without bias: a row's gradient is ``2 (w x - y) x``."""

    def __init__(self, persons: Sequence[int] = ()) -> None:
        self._persons = persons

    def model(self) -> nn.Module:
        return nn.Linear(2, 1, bias=False)

    def data(self, slot: SiloSlot) -> SiloData:
        return SiloData(TensorDataset(INPUTS, TARGETS), TensorDataset(INPUTS, TARGETS))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return (model(batch[0]) - batch[1]).square().mean()

    def score(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        errors = (model(batch[0]) - batch[1]).abs()
        return errors.sum(), (errors < 1).sum()

    def persons(self, slot: SiloSlot, column: str) -> NDArray[np.int64]:
        return np.array(self._persons, np.int64)


class Fixed:
    """Random numbers of a test: each step's units, and noise that is 1, 2, ... everywhere in turn."""

    def __init__(self, *units: Sequence[int]) -> None:
        self.units = list(units)
        self.rates: list[tuple[int, float]] = []
        self.drawn = 0

    def add_noise(self, total: Tensor, deviation: float) -> None:
        self.drawn += 1
        total.add_(deviation * self.drawn)

    def chosen(self, units: int, rate: float) -> NDArray[np.int64]:
        self.rates.append((units, rate))
        return np.array(self.units.pop(0), np.int64)


def slot() -> SiloSlot:
    return SiloSlot("silo-0", 0, 3, 7)


def trainer(task: Task | None = None, settings: PrivateSettings | None = None, **options: Any) -> PrivateTrainer:
    made = PrivateTrainer(task or Line(), slot(), LocalOptions(device="cpu", private=True, threads=1, **options))
    if settings is not None:
        made.make_private(settings)
    return made


def order(batch_size: int = 2, max_steps: int = 1, learning_rate: float = 1.0, **more: Any) -> WorkOrder:
    more = {"seed": 1, "evaluate": False, **more}
    return WorkOrder("silo-0/1", 0, 1, batch_size, max_steps, learning_rate, **more)


def clipped(gradients: NDArray[np.float64], clip: float) -> NDArray[np.float64]:
    """Return the sum of the rows, each cut to the norm ``clip``."""
    norms = np.linalg.norm(gradients, axis=1, keepdims=True)
    total: NDArray[np.float64] = (gradients * np.minimum(1.0, clip / np.maximum(norms, 1e-12))).sum(axis=0)
    return total
