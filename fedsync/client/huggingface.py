"""Hugging Face's `Trainer` as an order's loop. Needs ``transformers`` and ``accelerate``."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from transformers import Trainer, TrainerCallback

from fedsync.client.work import Work


class FedSyncTrainerCallback(TrainerCallback):
    """Counts batches of `Trainer.train` as steps of an order and stops it where the order ends.

    What the trainer evaluates on the way is no training time.

    Args:
        work: the order.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._steps = work.counter()
        self._evaluation = ExitStack()

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        next(self._steps)

    def on_substep_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """A batch whose gradient is kept for the next one."""
        try:
            next(self._steps)
        except StopIteration:
            control.should_training_stop = True

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.on_substep_end(args, state, control)
        if control.should_evaluate:  # the trainer does so now
            self._evaluation.enter_context(self._work.untimed())

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._evaluation.close()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **more: Any) -> None:
        """At the end the trainer says the mean over all steps, whatever ``logging_steps`` is."""
        if logs and "train_loss" in logs:
            self._work.log(loss=float(logs["train_loss"]))

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._evaluation.close()
        self._steps.close()


def trainer_for(work: Work, trainer: Trainer) -> Trainer:
    """The same trainer, which trains on an order's batches until the order ends.

    Its model, optimizer, schedule, collator, columns and workers stay its own. Schedules are as long as the order.

    Args:
        work: the order.
        trainer: with a data set as large as ``setup`` said.
    """
    theirs = trainer.get_train_dataloader()
    ours = work.loader(
        theirs.dataset, collate_fn=theirs.collate_fn, num_workers=theirs.num_workers, pin_memory=theirs.pin_memory
    )
    trainer.get_train_dataloader = lambda: ours
    trainer.args.max_steps = -(-work.max_steps // trainer.args.gradient_accumulation_steps)
    trainer.add_callback(FedSyncTrainerCallback(work))
    return trainer
