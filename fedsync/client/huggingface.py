"""Adapter for local training with Hugging Face's `Trainer`; needs ``transformers`` and ``accelerate``."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from transformers import EarlyStoppingCallback, Trainer, TrainerCallback
from transformers.training_args import ParallelMode

from fedsync.client.work import Work, refuse_unprivate


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
        if args.eval_on_start:  # the trainer evaluates right after this callback
            self._evaluation.enter_context(self._work.untimed())

    def on_substep_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if next(self._steps, "over"):
            control.should_training_stop = True

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.on_substep_end(args, state, control)
        if control.should_evaluate:
            self._evaluation.enter_context(self._work.untimed())

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._evaluation.close()

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._evaluation.close()
        self._steps.close()


def trainer_for(work: Work, trainer: Trainer) -> Trainer:
    """Make ``trainer`` train on an order's batches until the order ends, and return it.

    The trainer keeps its model, optimizer, schedule, collator, columns and workers. Its data set must have as many
    samples as ``setup`` reported. Schedules span the order. In a private run, the steps of its optimizer are private.
    ``max_grad_norm`` then has no effect, because a private step replaces the gradient that the trainer clips.

    Raises:
        ConfigError: the run is private, and an option of ``trainer`` has no private steps.
    """
    if work.is_private:
        refuse_unprivate("Hugging Face", _unprivate(trainer))
    theirs = trainer.get_train_dataloader()
    ours = work.loader(
        theirs.dataset, collate_fn=theirs.collate_fn, num_workers=theirs.num_workers, pin_memory=theirs.pin_memory
    )
    # Accelerate does not prepare this loader. Its own would fetch a batch ahead, which a private step does not allow.
    trainer.get_train_dataloader = lambda: ours
    if work.is_private:
        create = trainer.create_optimizer

        def create_private(model: Any = None) -> Any:
            _, trainer.optimizer, _ = work.private(trainer.model, create(model), ours)
            return trainer.optimizer

        trainer.create_optimizer = create_private
    train_step = trainer.training_step

    def logged(*given: Any, **more: Any) -> Any:
        loss = train_step(*given, **more)
        if loss.isfinite() or not trainer.args.logging_nan_inf_filter:
            # The trainer divides the loss by the number of accumulated batches.
            work.log(loss=loss * trainer.current_gradient_accumulation_steps)
        return loss

    trainer.training_step = logged
    trainer.args.max_steps = -(-work.max_steps // trainer.args.gradient_accumulation_steps)
    trainer.add_callback(FedSyncTrainerCallback(work))
    return trainer


def _unprivate(trainer: Trainer) -> dict[str, bool]:
    args, callbacks = trainer.args, trainer.callback_handler.callbacks
    return {
        "gradient_accumulation_steps": args.gradient_accumulation_steps != 1,
        "fp16 or bf16": args.fp16 or args.bf16,
        "torch_compile": args.torch_compile,
        str(args.parallel_mode): args.parallel_mode is not ParallelMode.NOT_PARALLEL,
        "reduce_lr_on_plateau or greedy": args.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy"),
        "EarlyStoppingCallback": any(isinstance(each, EarlyStoppingCallback) for each in callbacks),
    }
