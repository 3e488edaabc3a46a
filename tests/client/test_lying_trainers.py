"""Loops of Lightning and Hugging Face that change the model by anything but private steps, each of them refused.

The trial at the start of a run sees an honest loop, so that the order itself finds what is wrong. `make examples` runs
this, since not everybody has the libraries.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from fedsync.common.errors import ConfigError
from tests.client.test_private_loops import half_squares, settings, trainer_of, update_of
from tests.client.trainer_loops import STEPS, ByHand, Lit, Loop, face, fit, honest_trial, network

pytestmark = pytest.mark.examples
lightning = pytest.importorskip("lightning")
transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Nothing(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if self.global_step == 1 else super().training_step(batch, batch_idx)


class Skipping(Lit):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if batch_idx == 1 else None


class StepsTwice(ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        return super().training_step(batch, batch_idx)


class NoStep(ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if batch_idx < STEPS - 1 else None


class Fetching(Lit):
    """A module that fetches its batches itself, one ahead of the step."""

    def training_step(self, dataloader_iter: Iterator[Any]) -> Any:
        batch = getattr(self, "ahead", None) or next(dataloader_iter)[0]
        self.ahead = next(dataloader_iter)[0]
        return half_squares(self.net, batch)


def prepared(trainer: Any) -> None:
    """Have Accelerate fetch a batch ahead, as it does with the trainer's own loader."""
    ours = trainer.get_train_dataloader()
    ahead = lambda: shard(ours)  # noqa: E731

    def shard(loader: DataLoader[Any]) -> Any:
        from accelerate.data_loader import DataLoaderShard

        found = DataLoaderShard(loader.dataset, batch_sampler=loader.batch_sampler, collate_fn=loader.collate_fn)
        found.base_dataloader = loader
        return found

    trainer.get_train_dataloader = ahead


class FaceSkipping(transformers.Trainer):  # type: ignore[misc, name-defined]
    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        if self.state.global_step == 1:
            next(epoch_iterator)
        return super().get_batch_samples(epoch_iterator, num_batches, device)


class FaceTwice(transformers.Trainer):  # type: ignore[misc, name-defined]
    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        if self.state.global_step != 1:
            self.kept = super().get_batch_samples(epoch_iterator, num_batches, device)
        return self.kept


OWN_BATCH, CHANGED, AGAIN = r"step \d comes after \d batches", "changed by something other", "read a second time"
COUNTED = r"took \d batches of the private loader and did \d private steps"


@pytest.mark.parametrize(
    ("loop", "said"),
    [
        (honest_trial(fit, kind=Nothing), "step 2 has no gradients"),
        (honest_trial(fit, kind=Skipping), AGAIN),
        (honest_trial(fit, limit_train_batches=1), AGAIN),
        (honest_trial(fit, kind=StepsTwice), "step 2 comes after 1 batches"),
        (honest_trial(fit, kind=NoStep), COUNTED),
        (honest_trial(fit, kind=Fetching), "step 1 comes after 2 batches.*fetch no batch ahead"),
        (honest_trial(face, after=prepared), "step 1 comes after 2 batches.*fetch no batch ahead"),
        (honest_trial(face, kind=FaceSkipping), "step 2 comes after 3 batches"),
        (honest_trial(face, kind=FaceTwice), "step 2 comes after 1 batches"),
    ],
)
def test_each_batch_has_one_step_before_the_next_is_taken(loop: Loop, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        update_of(trainer_of(loop, network), settings(seeded=True), batch_size=2, steps=STEPS)


def own_gradient(net: nn.Module) -> torch.optim.Optimizer:
    """An optimizer without noise, and a gradient for it that no clipping bounds."""
    plain = torch.optim.SGD(net.parameters(), lr=0.1)
    plain.zero_grad()
    (net(torch.tensor([[3.0, 4.0]])) ** 2).sum().backward()
    return plain


class StepsAfter(lightning.Callback):  # type: ignore[misc, name-defined]
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        own_gradient(module.net).step()


class StepsInside(lightning.Callback):  # type: ignore[misc, name-defined]
    """The optimizer that the private one wraps, stepped with the plain gradient that Lightning has just computed."""

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        optimizer.original_optimizer.step()


class StepsAtEnd(lightning.Callback):  # type: ignore[misc, name-defined]
    def on_train_end(self, trainer: Any, module: Any) -> None:
        own_gradient(module.net).step()


class SecondOptimizer(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        own_gradient(self.net).step()
        return super().training_step(batch, batch_idx)


class Changes(lightning.Callback):  # type: ignore[misc, name-defined]
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            module.net[0].weight += batch[0].mean()


class SwapsBack(lightning.Callback):  # type: ignore[misc, name-defined]
    """For all steps, or for the one in the middle alone."""

    def __init__(self, only: int | None = None) -> None:
        self.only, self.private = only, None

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.private = self.private or trainer.strategy.optimizers
        swapped = self.only in (None, batch_idx)
        trainer.strategy.optimizers = [self.private[0].original_optimizer] if swapped else self.private


class ReadsLoader(lightning.Callback):  # type: ignore[misc, name-defined]
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        next(iter(trainer.train_dataloader))


def stochastic_average() -> Any:
    return lightning.pytorch.callbacks.StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1)


def lying_fit(*callbacks: Callable[[], Any], **options: Any) -> Loop:
    return lambda work, model, train: honest_trial(fit, callbacks=[each() for each in callbacks], **options)(
        work, model, train
    )


class OnStep(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """A callback that does something at one of the trainer's events."""

    def __init__(self, event: str, do: Callable[..., None]) -> None:
        setattr(self, event, lambda args, state, control, **more: do(more, state.global_step))


def steps_plain(more: Any, _: int) -> None:
    own_gradient(more["model"].net).step()


def steps_original(more: Any, _: int) -> None:
    more["optimizer"].optimizer.original_optimizer.step()


def changes(more: Any, _: int) -> None:
    more["model"].net[0].weight.data.add_(0.1)


class KeepsAverage(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.mean = torch.optim.swa_utils.AveragedModel(more["model"], use_buffers=False)

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.mean.update_parameters(more["model"])

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        more["model"].load_state_dict(self.mean.module.state_dict())


def swaps(more: Any, done: int) -> None:
    wrapped = more["optimizer"]
    if done == 1:
        wrapped.optimizer = wrapped.optimizer.original_optimizer


class StepsItself(transformers.Trainer):  # type: ignore[misc, name-defined]
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.optimizer.optimizer.original_optimizer.step()
        return loss


class Own(transformers.Trainer):  # type: ignore[misc, name-defined]
    """A trainer whose optimizer is not the one of `create_optimizer`."""

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        return super().create_scheduler(num_training_steps, optimizer)


def on(event: str, do: Callable[..., None]) -> Loop:
    return honest_trial(face, callbacks=[OnStep(event, do)])


@pytest.mark.parametrize(
    ("loop", "said"),
    [
        (lying_fit(StepsAfter), CHANGED),
        (lying_fit(StepsInside), CHANGED),
        (lying_fit(StepsAtEnd), CHANGED),
        (lying_fit(kind=SecondOptimizer), CHANGED),
        (lying_fit(Changes), CHANGED),
        (lying_fit(lightning.pytorch.callbacks.WeightAveraging), CHANGED),
        (lying_fit(stochastic_average, max_epochs=1), CHANGED),
        (lying_fit(SwapsBack), COUNTED),
        (lying_fit(lambda: SwapsBack(only=1)), "step 2 comes after 3 batches"),
        (lying_fit(lambda: SwapsBack(only=STEPS - 1)), COUNTED),
        (lying_fit(ReadsLoader), AGAIN),
        (lying_fit(lightning.pytorch.callbacks.LearningRateFinder, max_epochs=1), "read before the loop is private"),
        (on("on_step_end", steps_plain), CHANGED),
        (on("on_pre_optimizer_step", steps_original), CHANGED),
        (on("on_step_end", changes), CHANGED),
        (honest_trial(face, callbacks=[KeepsAverage()]), CHANGED),
        (on("on_step_begin", swaps), COUNTED),
        (honest_trial(face, kind=StepsItself), CHANGED),
        (honest_trial(face, kind=Own), COUNTED),
    ],
)
def test_a_step_that_is_not_private_is_refused(loop: Loop, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        update_of(trainer_of(loop, network), settings(seeded=True), batch_size=2, steps=STEPS)
    assert str(error.value).startswith("privacy:")
