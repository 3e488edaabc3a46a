"""Adapter for local training with Keras' `Model.fit`; needs ``keras`` with PyTorch (``KERAS_BACKEND=torch``)."""

from __future__ import annotations

from collections.abc import Mapping

import keras

from fedsync.client.work import Work
from fedsync.common.errors import ConfigError


class FedSyncFitCallback(keras.callbacks.Callback):
    """Callback that counts batches of `Model.fit` as steps of an order, and stops training at the order's end.

    Optimizer, loss and metrics stay those of ``compile``. Give ``fit`` the batches of ``work.loader`` and one epoch,
    which has all steps of the order; validation comes after them. Raises `ConfigError` in a private run.
    """

    def __init__(self, work: Work) -> None:
        super().__init__()
        if work.is_private:
            problem = "loops of Keras have no private steps, because its optimizers are not those of PyTorch"
            remedy = "Write the loop yourself, with work.private, or use Lightning or Hugging Face"
            raise ConfigError("privacy", problem, remedy)
        self._work = work
        self._steps = work.counter()
        self._batches = 0  # of this epoch

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        next(self._steps)

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        self._batches += 1
        if next(self._steps, "over"):
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        # Keras reports the mean over the batches of an epoch.
        for _ in range(self._batches):
            self._work.log(loss=float((logs or {})["loss"]))
        self._batches = 0

    def on_train_end(self, logs: Mapping[str, float] | None = None) -> None:
        self._steps.close()
