"""Estimate of a silo's update size before its first update."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from fedsync.common.errors import Diverged, UserCodeError
from fedsync.core.orders import Cursor, WorkOrder
from fedsync.model.layout import Vector
from fedsync.train.silo_trainer import Outcome, TrainerFacts

_STEPS = 2

_LARGEST = np.float32(2.0**24)
"""Upper bound for the values of an update."""


class Estimating(Protocol):
    """Trainer as far as an estimate needs it; see `fedsync.train.silo_trainer.SiloTrainer`."""

    @property
    def facts(self) -> TrainerFacts: ...

    def initial_model(self) -> Vector: ...

    def run(self, order: WorkOrder, base: Vector, cursor: Cursor) -> Outcome: ...


def likely_update(
    trainer: Estimating, batch_size: int, steps: int, learning_rate: float, seed: int
) -> tuple[Vector, int, int]:
    """Estimate a first update: do a few steps and scale the result up to all steps of an order.

    Steps partly cancel each other, so the estimate is rather too large than too small. If the steps diverge, the
    estimate is the upper bound. Divergence depends on the data, and the person who chose the learning rate must not
    learn about the data from the greeting. The trainer's later results do not change.

    Returns:
        The update, float32 [layout.size]; ``steps``; number of samples in these steps.
    """
    count = min(steps, _STEPS)
    order = WorkOrder(
        update_id="",
        base_version=0,
        round=0,
        batch_size=min(batch_size, trainer.facts.examples),
        max_steps=count,
        learning_rate=learning_rate,
        seed=seed,
        evaluate=False,
    )
    try:
        update = trainer.run(order, trainer.initial_model(), Cursor()).update
    except UserCodeError:
        # The first real order will fail in the same way and report the error.
        update = np.zeros(trainer.facts.layout.size, np.float32)
    except Diverged:
        update = np.full(trainer.facts.layout.size, _LARGEST)
    np.clip(update, -_LARGEST, _LARGEST, out=update)
    update *= np.float32(steps / count)
    return update, steps, steps * order.batch_size
