from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsync.common.errors import ConfigError
from fedsync.core.orders import Cursor
from fedsync.extras.tasks.networks import LstmClassifier
from fedsync.tasks.task_protocol import Batch
from fedsync.train.machine.device import Precision, PrecisionName
from fedsync.train.options import LocalOptions
from tests.train.make import Cramped, TwoClasses, order, trainer

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Spying(TwoClasses):
    """Remembers in which floats the network computed, in training and in evaluation."""

    def __init__(self) -> None:
        self.trained: set[torch.dtype] = set()
        self.scored: set[torch.dtype] = set()

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        self.trained.add(model(batch[0]).dtype)
        return super().loss(model, batch)

    def score(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        self.scored.add(model(batch[0]).dtype)
        return super().score(model, batch)


def options(precision: PrecisionName, **more: Any) -> LocalOptions:
    return LocalOptions(device="cpu", precision=precision, **more)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_the_network_computes_as_asked_and_evaluates_in_float32(precision: PrecisionName, dtype: torch.dtype) -> None:
    task = Spying()
    subject = trainer(task, options=options(precision))
    outcome = subject.run(order(evaluate=True), subject.initial_model(), Cursor())
    assert (task.trained, task.scored) == ({dtype}, {torch.float32})
    assert outcome.update.dtype == np.float32


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_the_bits_learn_nearly_the_same(precision: PrecisionName) -> None:
    exact, half = trainer(), trainer(options=options(precision))
    base = exact.initial_model()
    expected = exact.run(order(max_steps=20), base, Cursor()).update
    half.run(order(batch_size=13, seed=3), base, Cursor())  # of which nothing stays, such as a scale
    update = half.run(order(max_steps=20), base, Cursor()).update
    np.testing.assert_array_equal(half.run(order(max_steps=20), base, Cursor()).update, update)
    # bf16 has 8 bits, so each product is off by up to 0.4 %; some activations near 0 fall on the other side.
    assert 0 < np.linalg.norm(update - expected) < 0.05 * np.linalg.norm(expected)


def test_proximal_term_and_pieces_see_gradients_of_true_size() -> None:
    exact = trainer(options=LocalOptions(device="cpu", proximal=0.5))
    half = trainer(Cramped(5), options=options("fp16", proximal=0.5))
    base = exact.initial_model()
    expected = exact.run(order(max_steps=20), base, Cursor()).update
    update = half.run(order(max_steps=20), base, Cursor()).update
    assert np.linalg.norm(update - expected) < 0.05 * np.linalg.norm(expected)


class HalfPrecision(TwoClasses):
    """Parameters in bfloat16, and a loss without a gradient on them."""

    def model(self) -> nn.Module:
        return super().model().to(torch.bfloat16)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return sum(tensor.sum() for tensor in model.parameters()).float() * 0.0  # type: ignore[union-attr]


def test_rounding_of_the_received_model_is_no_part_of_the_update() -> None:
    subject = trainer(HalfPrecision(), options=options("fp32"))
    base = subject.initial_model() + np.float32(1 / 3)  # which bfloat16 rounds
    assert not subject.run(order(max_steps=3), base, Cursor()).update.any()


class Steep(TwoClasses):
    """The loss times a factor: scaled for fp16, its gradients overflow above some scale."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.calls = 0

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        self.calls += 1
        return super().loss(model, batch) * self.factor


def test_a_step_that_overflows_is_done_again_at_a_smaller_scale() -> None:
    # The gradients of the logits, of size 1/8 at most, times 1e5 and the scale must stay below 65504.
    steep, exact = Steep(1e5), Steep(1e5)
    subject = trainer(steep, options=options("fp16"))
    base = subject.initial_model()
    report = subject.run(order(max_steps=3, learning_rate=1e-6), base, Cursor()).report
    expected = trainer(exact).run(order(max_steps=3, learning_rate=1e-6), base, Cursor()).report
    assert report.steps == exact.calls == 3
    assert 5 <= steep.calls <= 20, "3 steps, and one again for each halving of the scale"
    assert report.loss == pytest.approx(expected.loss, rel=0.01)


def test_gradients_that_overflow_at_any_scale_are_an_error() -> None:
    subject = trainer(Steep(1e12), options=options("fp16"))
    with pytest.raises(ConfigError) as caught:
        subject.run(order(learning_rate=1e-12), subject.initial_model(), Cursor())
    assert caught.value.place == "local.precision"
    assert "bf16" in caught.value.remedy


def test_a_gpu_without_bf16_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an old one")
    with pytest.raises(ConfigError) as caught:
        Precision("bf16", GPU)
    assert "an old one" in caught.value.problem
    assert "fp16" in caught.value.remedy
    Precision("fp16", GPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    Precision("bf16", GPU)


class Pictures(TwoClasses):
    """The same points as pictures of four pixels, for a network with a convolution."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 8, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))


class Normed(TwoClasses):
    """A network with a norm that keeps what it has seen."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))


class Recurrent(TwoClasses):
    """An LSTM over the four features as a sequence, behind such a norm."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(4), nn.Unflatten(1, (4, 1)), LstmClassifier((4, 1), 8, 2, 2))


@pytest.mark.parametrize(
    ("precision", "kind", "remedy"),
    [("fp16", torch.float16, "Write bf16 or fp32"), ("bf16", torch.bfloat16, "Write fp32")],
)
def test_half_floats_that_a_processor_lacks_are_one_error_before_anything_trains(
    precision: PrecisionName, kind: torch.dtype, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A processor without LSTMs in these floats, whatever this one has."""
    forward = nn.LSTM.forward

    def lacking(self: nn.LSTM, *given: Any) -> Any:
        if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is kind:
            raise RuntimeError("could not create a primitive descriptor for the LSTM. Run it elsewhere")
        return forward(self, *given)

    monkeypatch.setattr(nn.LSTM, "forward", lacking)
    with pytest.raises(ConfigError) as caught:
        trainer(Recurrent(), options=options(precision))
    assert caught.value.place == "local.precision"
    assert "could not create a primitive descriptor for the LSTM" in caught.value.problem
    assert caught.value.remedy.startswith(remedy)
    subject = trainer(Recurrent())
    assert subject.run(order(), subject.initial_model(), Cursor()).report.steps == 5, "float32 is as it was"


def test_trying_half_floats_changes_no_model_and_hides_no_other_error() -> None:
    exact, half = trainer(Normed()), trainer(Normed(), options=options("bf16"))
    for one, other in zip(exact._model.buffers(), half._model.buffers(), strict=True):
        assert torch.equal(one, other)
    assert all(parameter.grad is None for parameter in half._model.parameters())

    class Wrong(Normed):
        def loss(self, model: nn.Module, batch: Batch) -> Tensor:
            raise RuntimeError("a mistake of the task's own")

    with pytest.raises(RuntimeError, match="a mistake of the task's own"):
        trainer(Wrong(), options=options("fp16"))
