from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedsync.common.errors import ConfigError, Diverged
from fedsync.core.orders import Cursor
from fedsync.model.layout import Vector
from fedsync.tasks.task_protocol import SiloData, SiloSlot
from fedsync.train import loop
from fedsync.train.batches import Sampler
from fedsync.train.loop import Trainer
from fedsync.train.options import LocalOptions, optimizers
from fedsync.train.weights import TaskModel, Weights
from tests.train.make import EXAMPLES, Clock, Dropping, TwoClasses, order, slot, trainer


def test_the_update_is_what_a_bare_loop_computes() -> None:
    subject = trainer()
    base = subject.initial_model()
    model = TwoClasses().model()
    Weights(model).load(base)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, labels = TwoClasses().data(slot()).train.tensors
    sampler, cursor, losses = Sampler(EXAMPLES, 7, "silo-0"), Cursor(), []
    for _ in range(12):
        rows, cursor = sampler.take(cursor, 8)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs[rows]), labels[rows])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    outcome = subject.run(order(batch_size=8, max_steps=12), base, Cursor())
    np.testing.assert_array_equal(outcome.update, Weights(model).read() - base)
    assert outcome.update.dtype == np.float32
    assert outcome.report.loss == pytest.approx(np.mean(losses))
    # Gradients are as large as the model; what follows, the update, takes as much.
    assert all(parameter.grad is None for parameter in subject._parameters)
    assert outcome.cursor == cursor == Cursor(2, 16)
    assert (outcome.report.base_version, outcome.report.steps, outcome.report.samples) == (3, 12, 96)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_clipping_mixed_precision_and_an_optimizer_s_keywords_are_those_of_a_bare_loop(precision: Any) -> None:
    options = LocalOptions({"kind": "adamw", "betas": [0.9, 0.98]}, clip_norm=0.1, device="cpu", precision=precision)
    subject, model = trainer(options=options), TwoClasses().model()
    base = subject.initial_model()
    Weights(model).load(base)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.9, 0.98))
    inputs, labels = TwoClasses().data(slot()).train.tensors
    rows, _ = Sampler(EXAMPLES, 7, "silo-0").take(Cursor(), 7 * 8)
    for batch in np.split(rows, 7):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = nn.functional.cross_entropy(model(inputs[batch]), labels[batch])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    for _ in range(2):  # the optimizer begins anew
        found = subject.run(order(batch_size=8, max_steps=7), base, Cursor()).update
        np.testing.assert_allclose(found, Weights(model).read() - base, rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", [LocalOptions(momentum=0.9), LocalOptions("adam")])
def test_the_same_inputs_give_the_same_bits_whatever_ran_between(options: LocalOptions) -> None:
    """Of a model that draws; the caller's generator and the base are left alone."""
    subject, other = trainer(Dropping(), 0, options), trainer(Dropping(), 1, options)
    base = subject.initial_model()
    base.setflags(write=False)
    state = torch.get_rng_state()
    first = subject.run(order(evaluate=True), base, Cursor())
    assert torch.equal(torch.get_rng_state(), state)
    other.run(order(batch_size=5, seed=9), base, Cursor())
    subject.run(order(batch_size=13, seed=3), base + first.update, first.cursor)
    torch.rand(3)
    again = subject.run(order(evaluate=True), base, Cursor())
    fresh = trainer(Dropping(), 0, options).run(order(), base, Cursor())
    assert first.update.tobytes() == again.update.tobytes() == fresh.update.tobytes()
    assert first.report.loss == again.report.loss == fresh.report.loss
    assert first.report.evaluation == again.report.evaluation
    assert first.cursor == again.cursor
    assert subject.run(order(seed=2), base, Cursor()).update.tobytes() != first.update.tobytes(), "the seed decides"


class Remembering(torch.optim.SGD):
    """Has a memory before its first step, and needs it, as Adagrad of older versions."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["steps"] = 0

    def step(self, closure: Any = None) -> Any:
        for state in [self.state[parameter] for group in self.param_groups for parameter in group["params"]]:
            state["steps"] += 1
            self.param_groups[0]["lr"] = 0.1 / state["steps"]
        return super().step(closure)


class Flat(TwoClasses):
    """Two dimensions everywhere, which is all that Muon takes."""

    def model(self) -> nn.Module:
        return nn.Linear(4, 2, bias=False)


@pytest.mark.parametrize("kind", sorted(optimizers().keys() | {"remembering"}))
def test_any_optimizer_begins_anew_with_each_order(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.optim, "Remembering", Remembering, raising=False)
    subject = trainer(Flat(), options=LocalOptions(kind, device="cpu"))
    base = subject.initial_model()
    first, again = (subject.run(order(learning_rate=0.01), base, Cursor()).update for _ in range(2))
    assert first.tobytes() == again.tobytes() and first.any()


def test_silos_agree_on_the_initial_model_and_its_layout() -> None:
    first, second = trainer(index=0), trainer(index=1)
    np.testing.assert_array_equal(first.initial_model(), second.initial_model())
    assert not np.array_equal(first.initial_model(), TaskModel(TwoClasses(), seed=8).initial())
    assert first.layout == second.layout
    assert first.layout.size == 4 * 8 + 8 + 8 * 2 + 2
    assert first.examples == EXAMPLES
    assert first.device == "cpu"


def test_the_base_is_evaluated_before_training() -> None:
    subject = trainer()
    base = subject.initial_model()
    report = subject.run(order(max_steps=30, evaluate=True), base, Cursor()).report
    assert report.evaluation == subject.evaluate(base)
    assert report.evaluation is not None
    assert report.evaluation.samples == 10
    assert set(report.overhead_s) == {"load", "evaluate", "store"}


@pytest.mark.parametrize(
    ("budget_s", "steps"),
    [(0.25, 3), (0.3, 3), (0.0, 1), (99.0, 20)],  # steps of 0.1 s end at 0.1, 0.2, 0.3 s
)
def test_a_budget_ends_after_the_step_in_which_it_ran_out(
    monkeypatch: pytest.MonkeyPatch, budget_s: float, steps: int
) -> None:
    subject = trainer()
    base = subject.initial_model()
    # Powers of two, so that the sums of steps are exact; scaled to 0.1 s.
    Clock(monkeypatch, step_s=0.125)
    report = subject.run(order(max_steps=20, budget_s=budget_s * 1.25), base, Cursor()).report
    assert report.steps == steps
    assert report.samples == steps * 8
    assert report.compute_s == pytest.approx(steps * 0.125)
    assert [window.speed for window in report.windows] == pytest.approx([64.0] * steps)


def test_a_watcher_sees_every_step_and_can_end_the_order() -> None:
    subject = trainer()
    seen = []

    def watch(steps: int, samples: int) -> bool:
        seen.append((steps, samples))
        return steps < 3

    outcome = subject.run(order(), subject.initial_model(), Cursor(), watch=watch)
    assert seen == [(1, 8), (2, 16), (3, 24)]
    assert outcome.report.steps == 3
    assert outcome.cursor == Cursor(0, 24)


def test_no_steps_is_no_update() -> None:
    outcome = trainer().run(order(max_steps=0), trainer().initial_model(), Cursor(1, 2))
    assert not outcome.update.any()
    assert (outcome.report.steps, outcome.report.loss, outcome.report.windows) == (0, 0.0, ())
    assert outcome.cursor == Cursor(1, 2)


@pytest.mark.parametrize(
    ("told", "problem"),
    [
        (lambda losses: losses.mean().detach(), "it returned a loss without a gradient"),
        (lambda losses: losses.mean().item(), "it returned a float in place of a tensor"),
        (lambda losses: None, "it returned a NoneType in place of a tensor"),
        (lambda losses: losses, r"the loss has the shape \(8,\)\. Return a scalar: the mean over the batch"),
    ],
)
def test_a_loss_that_is_no_scalar_with_a_gradient_is_refused_in_a_sentence(
    told: Callable[[torch.Tensor], Any], problem: str
) -> None:
    class Odd(TwoClasses):
        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            inputs, labels = batch
            return told(nn.functional.cross_entropy(model(inputs), labels, reduction="none"))  # type: ignore[no-any-return]

    subject = Trainer(Odd(), slot(), LocalOptions(device="cpu"))
    with pytest.raises(ConfigError, match=f"task, loss: {problem}"):
        subject.run(order(), subject.initial_model(), Cursor())


@pytest.mark.parametrize("place", [0, -1], ids=["first", "last"])
def test_a_value_that_is_no_number_is_found_wherever_it_is(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is one, and so are all other values: a model of several spans, of which one was spoiled."""

    class Wide(TwoClasses):
        def model(self) -> nn.Module:
            return nn.Sequential(nn.Linear(4, 150_000, bias=False), nn.AdaptiveAvgPool1d(2))

    subject, read = trainer(Wide()), Weights.read

    def spoiled(weights: Weights) -> Vector:
        vector = read(weights)
        vector[place] = np.inf
        return vector

    base = subject.initial_model()
    assert np.isfinite(subject.run(order(max_steps=1), base, Cursor()).update).all()
    monkeypatch.setattr(Weights, "read", spoiled)
    with pytest.raises(Diverged):
        subject.run(order(max_steps=1), base, Cursor())


def test_a_diverged_update_never_leaves_the_silo_and_the_trainer_recovers() -> None:
    subject = trainer(options=LocalOptions(momentum=0.9))
    base = subject.initial_model()
    expected = subject.run(order(), base, Cursor()).update
    with pytest.raises(Diverged) as caught:
        subject.run(order(learning_rate=1e30), base, Cursor())
    assert caught.value.place == "local.learning_rate"
    np.testing.assert_array_equal(subject.run(order(), base, Cursor()).update, expected)


def test_a_silo_without_samples_is_refused() -> None:
    class Empty(TwoClasses):
        def data(self, slot: SiloSlot) -> SiloData:
            return SiloData(TensorDataset(torch.empty(0, 4)), TensorDataset(torch.empty(0, 4)))

    with pytest.raises(ConfigError, match="'silo-0' holds no training samples"):
        trainer(Empty())


def test_a_silo_without_test_samples_evaluates_to_nothing() -> None:
    class Untested(TwoClasses):
        def data(self, slot: SiloSlot) -> SiloData:
            train = super().data(slot).train
            return SiloData(train, TensorDataset(torch.empty(0, 4), torch.empty(0, dtype=torch.long)))

    subject = trainer(Untested())
    evaluation = subject.evaluate(subject.initial_model())
    assert (evaluation.loss, evaluation.correct, evaluation.samples) == (0.0, 0.0, 0)


def test_an_evaluation_is_of_the_known_labels_of_all_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    class Waiting(TwoClasses):
        """The labels of the last six test samples are unknown: the last batch of four has none."""

        def data(self, slot: SiloSlot) -> SiloData:
            data = super().data(slot)
            inputs, labels = data.test.tensors
            return SiloData(data.train, TensorDataset(inputs, torch.cat([labels[:4], torch.full((6,), -100)])))

    class Known(TwoClasses):
        def data(self, slot: SiloSlot) -> SiloData:
            data = super().data(slot)
            return SiloData(data.train, TensorDataset(*(each[:4] for each in data.test.tensors)))

    monkeypatch.setattr(loop, "_EVALUATION_BATCH", 4)
    waiting, known = (trainer(each).evaluate(trainer(each).initial_model()) for each in (Waiting(), Known()))
    assert waiting == known and known.samples == 4


def test_threads_and_resources_are_options(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    subject = Trainer(TwoClasses(), slot(), LocalOptions(device="cpu", threads=3, resources=False))
    report = subject.run(order(), subject.initial_model(), Cursor()).report
    assert asked == [3]
    assert report.metrics == {}
    assert {(window.cpu, window.memory) for window in report.windows} == {(None, None)}
