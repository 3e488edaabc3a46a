"""Adapter for local training with Lightning's `Trainer`; needs ``lightning``."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import lightning
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.strategies import SingleDeviceStrategy

from fedsync.client.work import Work, refuse_unprivate


class FedSyncCallback(lightning.Callback):
    """Callback that counts batches of `Trainer.fit` as steps of an order, and stops training at the order's end.

    Optimizers, schedules, loggers and precision stay those of module and trainer. Give ``fit`` the batches of
    ``work.loader``, or your own loader with ``work.batch_size`` samples per batch. Give the trainer ``max_epochs=-1``:
    the order decides the end. Validation during ``fit`` does not count as training time.

    In a private run, the callback makes the steps of the only optimizer private, and ``fit`` needs ``work.loader``.
    Gradient clipping then has no effect, because a private step replaces the gradient that Lightning clips.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._steps = work.counter()
        self._validation = ExitStack()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if self._work.is_private:
            refuse_unprivate("Lightning", _unprivate(trainer))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self._work.is_private:
            _, optimizer, _ = self._work.private(pl_module, trainer.optimizers[0], trainer.train_dataloader)
            trainer.optimizers = [optimizer]
        trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None  # the order decides the end
        next(self._steps)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if loss is not None:
            # Lightning divides the loss by the number of accumulated batches.
            self._work.log(loss=loss * trainer.accumulate_grad_batches)
        try:
            self._steps.send(batch)
        except StopIteration:
            trainer.should_stop = True

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._validation.enter_context(self._work.untimed())

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._validation.close()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._steps.close()


def _unprivate(trainer: Any) -> dict[str, bool]:
    return {
        f"{len(trainer.optimizers)} optimizers": len(trainer.optimizers) != 1,
        "accumulate_grad_batches": trainer.accumulate_grad_batches != 1,
        f"precision {trainer.precision}": trainer.precision != "32-true",
        f"the strategy {type(trainer.strategy).__name__}": not isinstance(trainer.strategy, SingleDeviceStrategy),
        "ReduceLROnPlateau": any(each.reduce_on_plateau for each in trainer.lr_scheduler_configs),
        "EarlyStopping": any(isinstance(each, EarlyStopping) for each in trainer.callbacks),
    }
