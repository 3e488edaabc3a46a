"""Samples that a test makes up, as a source."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedsync.core.orders import Cursor, WorkOrder
from fedsync.extras.readers.samples import DataShape, Samples
from fedsync.model.layout import Vector
from fedsync.tasks.task_protocol import SiloSlot, Task
from fedsync.train.loop import Trainer
from fedsync.train.options import LocalOptions

OPTIONS = LocalOptions(device="cpu", resources=False)


@dataclass(frozen=True, eq=False)
class Given:
    train: Samples
    test: Samples | None = None
    classes: int = 2

    def shape(self) -> DataShape:
        return DataShape(self.train.inputs.shape[1:], self.classes)

    def read(self) -> tuple[Samples, Samples | None]:
        return self.train, self.test


def slot(index: int = 0, count: int = 1, seed: int = 7) -> SiloSlot:
    return SiloSlot(f"silo-{index}", index, count, seed)


def trainers(task: Task, count: int) -> list[Trainer]:
    return [Trainer(task, slot(index, count), OPTIONS) for index in range(count)]


def average(silos: Sequence[Trainer], model: Vector, *, learning_rate: float = 1.0, round: int = 1) -> Vector:
    """The model after a round of one step on all data of each silo, averaged by examples as the server does."""
    total = sum(silo.examples for silo in silos)
    merged = model.copy()
    for silo in silos:
        order = WorkOrder("u", round, round, silo.examples, 1, learning_rate, seed=round, evaluate=False)
        merged += np.float32(silo.examples / total) * silo.run(order, model, Cursor()).update
    return merged
