"""How large an update of a silo is likely to be, before it has made one."""

from __future__ import annotations

import numpy as np

from fedsync.common.errors import Diverged, UserCodeError
from fedsync.core.cursor import Cursor
from fedsync.core.orders import WorkOrder
from fedsync.model.layout import Vector
from fedsync.train.silo_trainer import SiloTrainer

_STEPS = 2

_LARGEST = np.float32(2.0**24)
"""Stands for a value of an update that is larger than any."""


def likely_update(
    trainer: SiloTrainer, batch_size: int, steps: int, learning_rate: float, seed: int
) -> tuple[Vector, int, int]:
    """Something of the size of a first update: a few steps, stretched to all of them.

    Steps partly undo each other, so it is rather too large than too small. Where they diverge it is as large as can be:
    whether they do depends on the data, and whoever chose the rate is not to learn it from a greeting.

    Args:
        trainer: of the silo; what it does next is not changed by this.
        batch_size: samples a step; cut to what the silo holds.
        steps: of an order.
        learning_rate: eta.
        seed: of the run.

    Returns:
        The update, float32 [layout.size]; ``steps``; samples of so many steps.
    """
    count = min(steps, _STEPS)
    order = WorkOrder(
        update_id="",
        base_version=0,
        round=0,
        batch_size=min(batch_size, trainer.examples),
        max_steps=count,
        learning_rate=learning_rate,
        seed=seed,
        evaluate=False,
    )
    try:
        update = trainer.run(order, trainer.initial_model(), Cursor()).update
    except UserCodeError:
        # Its first order will fail likewise, and tell of it.
        update = np.zeros(trainer.layout.size, np.float32)
    except Diverged:
        update = np.full(trainer.layout.size, _LARGEST)
    np.clip(update, -_LARGEST, _LARGEST, out=update)
    update *= np.float32(steps / count)
    return update, steps, steps * order.batch_size
