"""Adapter of Hugging Face's `Trainer` to an order's loop; needs ``transformers`` and ``accelerate``."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from transformers import Trainer, TrainerCallback

from fedsync.client.work import Work


class FedSyncTrainerCallback(TrainerCallback):
    """Callback that counts batches of `Trainer.train` as steps of an order, and stops training at the order's end.

    Evaluations during training do not count as training time.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._steps = work.counter()
        self._evaluation = ExitStack()

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        next(self._steps)

    def on_substep_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Count a batch whose gradient is accumulated."""
        try:
            next(self._steps)
        except StopIteration:
            control.should_training_stop = True

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.on_substep_end(args, state, control)
        if control.should_evaluate:  # the trainer evaluates right after this callback
            self._evaluation.enter_context(self._work.untimed())

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._evaluation.close()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **more: Any) -> None:
        """Log the loss at the end of training: the mean over all steps, for any value of ``logging_steps``."""
        if logs and "train_loss" in logs:
            self._work.log(loss=float(logs["train_loss"]))

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._evaluation.close()
        self._steps.close()


def trainer_for(work: Work, trainer: Trainer) -> Trainer:
    """Make ``trainer`` train on an order's batches until the order ends, and return it.

    The trainer keeps its model, optimizer, schedule, collator, columns and workers. Schedules span the order.

    Args:
        trainer: its data set must have as many samples as ``setup`` reported.
    """
    theirs = trainer.get_train_dataloader()
    ours = work.loader(
        theirs.dataset, collate_fn=theirs.collate_fn, num_workers=theirs.num_workers, pin_memory=theirs.pin_memory
    )
    trainer.get_train_dataloader = lambda: ours
    trainer.args.max_steps = -(-work.max_steps // trainer.args.gradient_accumulation_steps)
    trainer.add_callback(FedSyncTrainerCallback(work))
    return trainer
