"""Lightning's `Trainer` as an order's loop. Needs ``lightning``."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import lightning

from fedsync.client.work import Work


class FedSyncCallback(lightning.Callback):
    """Counts batches of `Trainer.fit` as steps of an order and stops it where the order ends.

    Optimizers, schedules, loggers and precision stay the module's and the trainer's. Give ``fit`` the batches of
    ``work.loader``, or a loader of your own with ``work.batch_size`` samples a batch. Give the trainer
    ``max_epochs=-1``: the order says when to stop. What ``fit`` validates on the way is no training time.

    Args:
        work: the order.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._steps = work.counter()
        self._validation = ExitStack()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        next(self._steps)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if loss is not None:
            # Lightning has divided it.
            self._work.log(loss=loss * trainer.accumulate_grad_batches)
        try:
            next(self._steps)
        except StopIteration:
            trainer.should_stop = True

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._validation.enter_context(self._work.untimed())

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._validation.close()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._steps.close()
