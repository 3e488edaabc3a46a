"""Adapter of Lightning's `Trainer` to an order's loop; needs ``lightning``."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import lightning

from fedsync.client.work import Work


class FedSyncCallback(lightning.Callback):
    """Callback that counts batches of `Trainer.fit` as steps of an order, and stops training at the order's end.

    Optimizers, schedules, loggers and precision stay those of module and trainer. Give ``fit`` the batches of
    ``work.loader``, or your own loader with ``work.batch_size`` samples per batch. Give the trainer ``max_epochs=-1``:
    the order decides the end. Validation during ``fit`` does not count as training time.
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
            # Lightning divides the loss by the number of accumulated batches.
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
