"""Loops of other libraries do the same as a loop by hand: the order's batches, its steps, its end.

`make examples` runs this, since not everybody has the libraries.
"""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message
from torch import nn
from torch.utils.data import DataLoader, Dataset

from fedsync.client import Work, steps
from fedsync.core.orders import MISSIZED, Cursor
from fedsync.train.silo_trainer import Outcome
from tests.client.clientapps import app_of, hosted, loader
from tests.client.test_own_loop import plain_sgd, trainer
from tests.client.trainer_loops import Lit, Loop, Wrapped, arguments, face, fit, with_options
from tests.train.make import EXAMPLES, order

pytestmark = pytest.mark.examples
os.environ.setdefault("KERAS_BACKEND", "torch")  # before it is imported
keras = pytest.importorskip("keras")
lightning = pytest.importorskip("lightning")
transformers = pytest.importorskip("transformers")

SLOW_S = 0.1
"""A batch of a validation."""


class SlowRows(Dataset[Any]):
    """Samples that are only validated on."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(SLOW_S)
        return torch.zeros(4), torch.tensor(0)


class Classifying(Lit):
    def loss(self, batch: Any) -> torch.Tensor:
        inputs, labels = batch
        return nn.functional.cross_entropy(self.net(inputs), labels)


class ClassifyingWrapped(Wrapped):
    def forward(self, points: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.net(points), targets)}


def by_lightning(**options: Any) -> Loop:
    return with_options(fit, kind=Classifying, **options)


def by_hugging_face(**options: Any) -> Loop:
    return with_options(face, net=ClassifyingWrapped, max_grad_norm=0.0, **options)


def by_keras(work: Work, model: nn.Module, train: Dataset[Any], **options: Any) -> None:
    from fedsync.client.keras import FedSyncFitCallback

    net = keras.Sequential([keras.layers.TorchModuleWrapper(model)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(optimizer=keras.optimizers.SGD(work.learning_rate), loss=loss)
    options = {"epochs": 1, "verbose": 0, "shuffle": False, **options}
    net.fit(work.loader(train), callbacks=[FedSyncFitCallback(work)], **options)


@pytest.fixture(params=[by_lightning(), by_hugging_face(), by_keras], ids=["lightning", "hugging face", "keras"])
def loop(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loop:
    monkeypatch.chdir(tmp_path)
    return request.param  # type: ignore[no-any-return]


def run(loop: Loop, last: int = 99, **what: Any) -> Outcome:
    guest = trainer(loop)
    return guest.run(order(**what), guest.initial_model(), Cursor(), watch=lambda steps, _: steps < last)


def test_the_update_is_that_of_a_loop_by_hand(loop: Loop) -> None:
    what = {"batch_size": 7, "max_steps": 9}
    theirs, ours = run(loop, **what), run(plain_sgd, **what)
    assert theirs.update == pytest.approx(ours.update, rel=1e-6, abs=1e-9)
    assert theirs.report.loss == pytest.approx(ours.report.loss, rel=1e-3)
    assert (theirs.report.steps, theirs.report.samples) == (9, 63)
    assert theirs.cursor == ours.cursor


@pytest.mark.parametrize(
    ("parted", "steps"),
    [
        (by_lightning(limit_train_batches=4), 9),
        (with_options(by_keras, steps_per_epoch=4, epochs=3), 9),
        (with_options(by_keras, steps_per_epoch=3), 3),
    ],
    ids=["lightning", "keras", "keras, to no end"],
)
def test_epochs_of_a_part_of_the_batches_go_on_and_keep_their_loss(parted: Loop, steps: int) -> None:
    theirs, ours = run(parted, batch_size=7, max_steps=9), run(plain_sgd, batch_size=7, max_steps=steps)
    assert theirs.update == pytest.approx(ours.update, rel=1e-6, abs=1e-9)
    assert theirs.report.loss == pytest.approx(ours.report.loss, rel=1e-3)
    assert theirs.cursor == ours.cursor


def test_an_order_that_is_halted_or_out_of_time_ends_there(loop: Loop) -> None:
    halted, ours = run(loop, last=4, max_steps=50), run(plain_sgd, last=4, max_steps=50)
    assert halted.report.steps == 4 and halted.cursor == ours.cursor
    assert halted.update == pytest.approx(ours.update, rel=1e-6, abs=1e-9)
    assert run(loop, max_steps=50, budget_s=0.0).report.steps == 1


@pytest.mark.parametrize(
    "validating",
    [
        by_lightning(test=DataLoader(SlowRows()), val_check_interval=2),
        by_hugging_face(test=SlowRows(), eval_strategy="steps", eval_steps=2),
        by_hugging_face(test=SlowRows(), eval_strategy="steps", eval_steps=5, eval_on_start=True),
    ],
    ids=["lightning", "hugging face", "at the start"],
)
def test_what_a_trainer_validates_on_the_way_is_no_training_time(
    validating: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before the end, either: it is over then. The bound is that of sleeps, which no machine makes shorter."""
    monkeypatch.chdir(tmp_path)
    outcome = run(validating, batch_size=7, max_steps=9)
    report = outcome.report
    assert report.steps == 9
    assert report.overhead_s["evaluate"] >= 3 * SLOW_S
    assert outcome.update == pytest.approx(run(plain_sgd, batch_size=7, max_steps=9).update, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("least", [{"min_steps": 30}, {"min_epochs": 3, "max_epochs": 3}])
def test_an_order_ends_before_the_least_number_of_steps_of_a_trainer(least: dict[str, int]) -> None:
    theirs, ours = (run(loop, last=4, max_steps=8) for loop in (by_lightning(**least), plain_sgd))
    assert theirs.report.steps == 4
    assert theirs.update == pytest.approx(ours.update, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("size", [8, 3])
def test_lightning_may_have_its_own_batches(size: int) -> None:
    def own(work: Work, model: nn.Module, train: Any) -> None:
        by_lightning(given=DataLoader(train, batch_size=size, shuffle=True))(work, model, train)

    report = run(own, batch_size=8, max_steps=12).report
    assert report.steps == 12 > EXAMPLES // 8, "passes follow one another"
    assert report.compute_s > 0
    assert (MISSIZED in report.metrics) == (size != 8), "the server learns that balancing does not reach them"


class Itself(Wrapped):
    """A model whose forward pass says its loss, as those of transformers do."""

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.net(inputs) - inputs).square().mean()}


@pytest.mark.parametrize("last", [99, 4])
@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_a_stock_app_gives_a_trainer_the_steps_of_its_message(
    library: str, last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    unshuffled = DataLoader(loader(8).dataset, batch_size=8)

    def by_hand(msg: Message, context: Context, net: nn.Module) -> dict[str, float]:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for (inputs,) in steps(msg, unshuffled):
            optimizer.zero_grad()
            (net(inputs) - inputs).square().mean().backward()
            optimizer.step()
        return {}

    class Same(Lit):
        def loss(self, batch: Any) -> torch.Tensor:
            return (self.net(batch[0]) - batch[0]).square().mean()

    def by_lightning(msg: Message, context: Context, net: nn.Module) -> dict[str, float]:
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        lightning.Trainer(max_epochs=1, accelerator="cpu", **quiet).fit(Same(net, 0.1), steps(msg, unshuffled))
        return {}

    def by_transformers(msg: Message, context: Context, net: nn.Module) -> dict[str, float]:
        args = arguments(
            per_device_train_batch_size=msg.content["config"]["batch-size"],
            num_train_epochs=1,
            learning_rate=0.1,
            max_grad_norm=0.0,
            train_sampling_strategy="sequential",
        )
        rows = [{"inputs": inputs} for (inputs,) in unshuffled.dataset]
        theirs = transformers.Trainer(model=Itself(net), args=args, train_dataset=rows)
        batches = steps(msg, theirs.get_train_dataloader())
        theirs.get_train_dataloader = lambda: batches
        theirs.train()
        return {}

    def outcome_of(loop: Any) -> Outcome:
        guest = hosted(app_of(loop))
        what = order(batch_size=8, max_steps=12)
        return guest.run(what, guest.initial_model(), Cursor(), watch=lambda done, _: done < last)

    ours, theirs = outcome_of(by_hand), outcome_of(by_lightning if library == "lightning" else by_transformers)
    assert theirs.report.steps == ours.report.steps == min(last, 12)
    assert theirs.update == pytest.approx(ours.update, rel=1e-6, abs=1e-9)


def test_gradients_add_up_over_batches_which_are_steps_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def by_hand(work: Work, model: nn.Module, train: Any) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=work.learning_rate)
        for number, (inputs, labels) in enumerate(work.loader(train), start=1):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            (loss / 2).backward()
            work.log(loss=loss)
            if number % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()

    ours = run(by_hand, batch_size=4, max_steps=8)
    for loop in (by_lightning(accumulate_grad_batches=2), by_hugging_face(gradient_accumulation_steps=2)):
        theirs = run(loop, batch_size=4, max_steps=8)
        assert theirs.report.steps == 8
        assert theirs.update == pytest.approx(ours.update, rel=1e-5, abs=1e-8)
        assert theirs.report.loss == pytest.approx(ours.report.loss, rel=1e-3)


@pytest.mark.parametrize("last", [3, 6])
def test_a_loss_is_the_mean_over_batches_where_an_order_ends_between_two_optimizer_steps(
    last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    loops = by_lightning(accumulate_grad_batches=4), by_hugging_face(gradient_accumulation_steps=4)
    ours, theirs = (run(loop, last=last, batch_size=4, max_steps=12).report for loop in loops)
    assert theirs.steps == ours.steps == last
    assert theirs.loss == pytest.approx(ours.loss, rel=1e-6)
