"""Private orders in loops of Lightning and Hugging Face: the steps of a plain private loop, or a refusal by name.

`make examples` runs this, since not everybody has the libraries.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from fedsync.client import Work
from fedsync.common.errors import ConfigError
from fedsync.core.orders import Cursor
from tests.client.test_private_loops import half_squares, private, settings, slope, stepping, trainer_of, update_of
from tests.client.trainer_loops import STEPS, ByHand, Lit, Loop, Wrapped, face, fit, network, with_options
from tests.train.make import order

pytestmark = pytest.mark.examples
lightning = pytest.importorskip("lightning")
transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


PAGE = Path(__file__).parents[2] / "docs" / "your-loop.md"
NO_EFFECT = 1e-6
"""A bound of the gradient's norm that would stop all learning."""


def biases_last(work: Work, model: nn.Module, train: Dataset[Any]) -> None:
    """A plain private loop that draws its noise in the order of Hugging Face's optimizers: biases last."""
    ordered = sorted(model.named_parameters(), key=lambda named: named[0].endswith("bias"))
    stepping(work, model, torch.optim.SGD([each for _, each in ordered], lr=work.learning_rate), train)


@pytest.mark.parametrize(
    ("loop", "plain"),
    [
        pytest.param(with_options(fit, gradient_clip_val=NO_EFFECT), private, id="lightning"),
        pytest.param(with_options(fit, kind=ByHand), private, id="manual"),
        pytest.param(with_options(face, max_grad_norm=NO_EFFECT), biases_last, id="hugging face"),
        pytest.param(with_options(face, dataloader_num_workers=1), biases_last, id="workers"),
    ],
)
def test_the_update_is_that_of_a_plain_private_loop(loop: Loop, plain: Loop) -> None:
    """With the same noise; the libraries' own clipping of the gradient that a private step replaces does nothing."""
    told = settings(1.0, seeded=True)
    ours, theirs = (
        update_of(trainer_of(each, network), told, batch_size=2, steps=STEPS, seed=11) for each in (plain, loop)
    )
    assert abs(ours.update).max() > 0.1
    assert theirs.update == pytest.approx(ours.update, rel=1e-5, abs=1e-7)
    assert theirs.report.loss == pytest.approx(ours.report.loss, rel=1e-3)
    assert (theirs.report.steps, theirs.report.samples) == (STEPS, 2 * STEPS)
    assert theirs.cursor == ours.cursor


def scheduled(work: Work, model: nn.Module, train: Dataset[Any]) -> None:
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=work.learning_rate, betas=(0.9, 0.999), weight_decay=0.1)
    model, optimizer, loader = work.private(model, optimizer, work.loader(train))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step / STEPS)
    for batch in loader:
        slope(model, batch)
        optimizer.step()
        schedule.step()


class Scheduled(Lit):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=self.lr, betas=(0.9, 0.999), weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step / STEPS)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@pytest.mark.parametrize(
    "loop",
    [
        pytest.param(with_options(fit, kind=Scheduled), id="lightning"),
        pytest.param(
            with_options(face, optim="adamw_torch", weight_decay=0.1, lr_scheduler_type="linear"), id="hugging face"
        ),
    ],
)
def test_optimizers_and_schedules_of_the_library_stay(loop: Loop) -> None:
    bare = lambda: nn.Sequential(nn.Linear(2, 1, bias=False))  # noqa: E731  # Hugging Face decays no bias
    told = settings(1.0, seeded=True)
    ours, theirs = (update_of(trainer_of(each, bare), told, batch_size=2, steps=STEPS) for each in (scheduled, loop))
    assert theirs.update == pytest.approx(ours.update, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize(("loop", "plain"), [(fit, private), (face, biases_last)])
def test_an_order_that_is_halted_is_private_up_to_there(loop: Loop, plain: Loop) -> None:
    def halted(each: Loop) -> Any:
        trainer = trainer_of(each, network)
        trainer.make_private(settings(1.0, seeded=True))
        asked = order(batch_size=2, max_steps=9, learning_rate=1.0)
        return trainer.run(asked, trainer.initial_model(), Cursor(), watch=lambda steps, _: steps < STEPS)

    ours, theirs = halted(plain), halted(loop)
    assert theirs.report.steps == STEPS
    assert theirs.update == pytest.approx(ours.update, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("loop", [fit, face])
def test_the_trial_runs_the_loop_to_its_first_step_and_leaves_nothing(loop: Loop) -> None:
    sizes: list[int] = []

    def counting(work: Work, model: nn.Module, train: Dataset[Any]) -> None:
        handle = model[0].register_forward_pre_hook(lambda _, given: sizes.append(len(given[0])))  # type: ignore[index]
        try:
            loop(work, model, train)
        finally:
            handle.remove()

    trainer = trainer_of(counting, network)
    trainer.make_private(settings(None))
    model = trainer._model
    assert sizes == [3, 1, 1, 1]
    assert trainer._weights.read() == pytest.approx(trainer.initial_model(), abs=0.0)
    assert not any(each._forward_hooks or each._backward_hooks for each in model.modules())
    assert all(each.grad is None and not vars(each).get("grad_sample") for each in model.parameters())


def stacked(samples: list[Any]) -> dict[str, Tensor]:
    words, labels = (torch.stack(each) for each in zip(*samples, strict=True))
    return {"input_ids": words, "labels": labels}


def collator_of_the_page() -> Callable[[list[Any]], dict[str, Tensor]]:
    """The function of docs/your-loop.md that adds positions."""
    (text,) = re.findall(r'```python title="collate.py"\n(.*?)```', PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {
        "DataCollatorWithPadding": lambda tokenizer: tokenizer,
        "tokenizer": stacked,
        "torch": torch,
    }
    exec(text, names)
    return names["collate"]  # type: ignore[no-any-return]


def bert() -> nn.Module:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.BertConfig(vocab_size=9, max_position_embeddings=4, **sizes)
    return transformers.BertForSequenceClassification(config)  # type: ignore[no-any-return]


def test_a_transformer_is_private_with_positions_for_each_row() -> None:
    """Its keys' bias has a gradient of zero but for rounding, and its dropout draws other neurons for a row alone."""

    def loop(work: Work, model: nn.Module, train: Dataset[Any]) -> None:
        words = TensorDataset(torch.tensor([[1, 2], [3, 4], [5, 6]]), torch.tensor([0, 1, 0]))
        face(work, model, words, net=lambda given: given, collate=collating)

    collating = collator_of_the_page()
    done = update_of(trainer_of(loop, bert), settings(1.0, seeded=True), batch_size=2, steps=STEPS)
    assert done.report.steps == STEPS and abs(done.update).max() > 0.0
    collating = stacked
    with pytest.raises(ConfigError, match=r"gradients of 1 rows.*position_ids"):
        trainer_of(loop, bert).make_private(settings(None))


class Mixing(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        points, targets = batch
        return half_squares(self.net, (points - points.mean(dim=0), targets))


class MixingWrapped(Wrapped):
    def forward(self, points: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return super().forward(points - points.mean(dim=0), targets)


class Two(ByHand):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(each.parameters(), lr=0.1) for each in (self.net[0], self.net[3])]


class Plateau(Lit):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "loss", "strict": False}}


class WithHead(Lit):
    def __init__(self, net: nn.Module, rate: float) -> None:
        super().__init__(net, rate)
        self.head = nn.Linear(1, 1)


def setting(**changed: Any) -> Callable[[Any], None]:
    """Arguments that need other hardware, or would start at once, set on a trainer that has none of them."""

    def change(trainer: Any) -> None:
        for name, value in changed.items():
            setattr(trainer.args, name, value)

    return change


class Changed(transformers.Trainer):  # type: ignore[misc, name-defined]
    changed: Any

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        setting(**self.changed)(self)


def changed(**what: Any) -> Any:
    return type("Changed", (Changed,), {"changed": what})


@pytest.mark.parametrize(
    ("loop", "said"),
    [
        (with_options(fit, kind=Two), "2 optimizers, which has no private steps"),
        (with_options(fit, accumulate_grad_batches=2), "accumulate_grad_batches"),
        (with_options(fit, precision="bf16-mixed"), "precision bf16-mixed"),
        (with_options(fit, precision="64-true"), "precision 64-true"),
        (with_options(fit, kind=Plateau), "ReduceLROnPlateau"),
        (with_options(fit, callbacks=[lightning.pytorch.callbacks.EarlyStopping("loss")]), "EarlyStopping"),
        (with_options(fit, kind=Mixing), "not the mean of the losses of its rows"),
        (with_options(fit, kind=WithHead), "module around the model has parameters that are not the model's"),
        (with_options(fit, given=[(torch.ones(1, 2), torch.ones(1))]), r"Give work\.loader"),
        (with_options(face, gradient_accumulation_steps=2), "gradient_accumulation_steps"),
        (with_options(face, kind=changed(fp16=True)), "fp16"),
        (with_options(face, bf16=True), "bf16"),
        (with_options(face, kind=changed(torch_compile=True)), "torch_compile"),
        (with_options(face, kind=changed(_n_gpu=2)), "NOT_DISTRIBUTED"),
        (with_options(face, kind=changed(lr_scheduler_type="reduce_lr_on_plateau")), "reduce_lr_on_plateau"),
        (with_options(face, callbacks=[transformers.EarlyStoppingCallback()]), "EarlyStoppingCallback"),
        (with_options(face, net=MixingWrapped), "not the mean of the losses of its rows"),
    ],
)
def test_what_has_no_private_steps_is_named_before_training(loop: Loop, said: str) -> None:
    trainer = trainer_of(loop, network)
    with pytest.raises(ConfigError, match=said):
        trainer.make_private(settings(None))
    assert trainer._weights.read() == pytest.approx(trainer.initial_model(), abs=0.0)


def test_a_strategy_of_several_processes_is_refused() -> None:
    try:
        with pytest.raises(ConfigError, match="DDPStrategy"):
            trainer_of(with_options(fit, strategy="ddp", devices=1), network).make_private(settings(None))
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def test_keras_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    pytest.importorskip("keras")
    from fedsync.client.keras import FedSyncFitCallback

    def loop(work: Work, model: nn.Module, train: Dataset[Any]) -> None:
        FedSyncFitCallback(work)

    with pytest.raises(ConfigError, match=r"loops of Keras have no private steps.*Write the loop yourself"):
        trainer_of(loop).make_private(settings(None))
