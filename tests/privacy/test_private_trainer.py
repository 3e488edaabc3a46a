"""DP-SGD at a silo: each step worked out by hand, and what cannot be trained so."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from opacus.layers import DPLSTM
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fedsync.client.app import Silo
from fedsync.common.errors import ConfigError, Diverged
from fedsync.config.strategy import StrategyConfig
from fedsync.config.tasks.task_trainers import trainer_of
from fedsync.core.orders import Cursor
from fedsync.model.layout import Vector
from fedsync.model.tensor_parts import PartPatterns
from fedsync.privacy.release import PrivateSettings
from fedsync.tasks.task_protocol import Batch, SiloData, SiloSlot, Task
from fedsync.train.dp_sgd import private_trainer
from fedsync.train.dp_sgd.private_step import check_layers
from fedsync.train.loop import Trainer
from fedsync.train.options import LocalOptions
from tests.privacy.make import INPUTS, TARGETS, Fixed, Line, clipped, order, slot, trainer
from tests.train.make import TwoClasses

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")

CLIP, NOISE = 2.0, 0.5
SETTINGS = PrivateSettings(CLIP, NOISE, 4)
NEARLY_NONE = PrivateSettings(CLIP, 1e-9, 4)
START = np.array([0.5, -0.25], np.float32)


@pytest.fixture
def random(monkeypatch: pytest.MonkeyPatch) -> Fixed:
    """Random numbers of the next order; the test says each step's units."""
    fixed = Fixed()
    monkeypatch.setattr(private_trainer, "random_of", lambda seed, *, seeded: fixed)
    return fixed


def row_gradients(weights: Vector = START) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Gradients of the four rows of `Line`, by hand."""
    inputs, targets = INPUTS.double().numpy(), TARGETS.double().numpy()
    return 2 * (inputs @ weights.astype(np.float64)[:, None] - targets) * inputs


def test_a_step_is_the_clipped_sum_with_noise_over_the_ordered_batch(random: Fixed) -> None:
    """Rows 0, 1 and 3 are drawn for a batch of 2; the first is cut from a norm of 5 to 2, and the others are not."""
    random.units = [[0, 1, 3]]
    gradients = row_gradients()
    norms = np.linalg.norm(gradients, axis=1)
    assert norms[0] > 2 * CLIP and max(norms[1], norms[3]) < CLIP
    found = trainer(settings=SETTINGS).run(order(), START, Cursor())
    total = gradients[0] * CLIP / norms[0] + gradients[1] + gradients[3]
    np.testing.assert_allclose(found.update, -(total + NOISE * CLIP * 1.0) / 2, rtol=1e-5)
    assert random.rates == [(4, 0.5)] and random.drawn == 1
    assert (found.report.steps, found.report.samples) == (1, 2)


def test_a_step_begins_where_the_last_one_ended(random: Fixed) -> None:
    random.units = [[2], [0, 2]]
    found = trainer(settings=SETTINGS).run(order(max_steps=2, learning_rate=0.1), START, Cursor())
    weights = START.astype(np.float64)
    for number, rows in enumerate(([2], [0, 2]), 1):
        weights = weights - 0.1 * (clipped(row_gradients(weights)[rows], CLIP) + NOISE * CLIP * number) / 2
    np.testing.assert_allclose(found.update, weights - START, rtol=1e-5)


def test_an_empty_draw_gives_noise_alone(random: Fixed) -> None:
    random.units = [[], []]
    found = trainer(settings=SETTINGS).run(order(max_steps=2), START, Cursor())
    np.testing.assert_allclose(found.update, [-NOISE * CLIP * (1 + 2) / 2] * 2, rtol=1e-6)
    assert found.report.loss == 0 and found.report.steps == 2


def test_a_person_of_two_rows_counts_once_by_the_mean_of_its_gradients(random: Fixed) -> None:
    """Persons 0 and 1 have rows 0 and 2, and 1 and 3. Only person 0's mean gradient is longer than the clip."""
    subject = trainer(Line(persons=[5, 9, 5, 9]))
    assert subject.make_private(PrivateSettings(CLIP, NOISE, 2, "person")) == 2
    random.units = [[0, 1]]
    found = subject.run(order(batch_size=1), START, Cursor())
    gradients = row_gradients()
    means = np.stack([gradients[[0, 2]].mean(axis=0), gradients[[1, 3]].mean(axis=0)])
    assert np.linalg.norm(means[0]) > CLIP > np.linalg.norm(means[1])
    np.testing.assert_allclose(found.update, -(clipped(means, CLIP) + NOISE * CLIP), rtol=1e-5)
    assert random.rates == [(2, 0.5)]


def test_rows_of_a_person_are_added_up_in_pieces_that_fit(random: Fixed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model has two values, so that one row's gradient is all that fits; a person may have any number of rows."""
    task, found = Line(persons=[5, 9, 5, 5]), []
    subject, loss, sizes = trainer(task, PrivateSettings(CLIP, NOISE, 2, "person")), task.loss, list[int]()

    def counted(model: nn.Module, batch: Batch) -> Tensor:
        sizes.append(len(batch[0]))
        return loss(model, batch)

    monkeypatch.setattr(task, "loss", counted)
    for values in (2**25, 2):
        monkeypatch.setattr(private_trainer, "_MOST_VALUES", values)
        random.units, random.drawn = [[0, 1]], 0
        found.append(subject.run(order(batch_size=1), START, Cursor()))
    assert sizes == [4, 1, 1, 1, 1]
    np.testing.assert_allclose(found[0].update, found[1].update, rtol=1e-6)
    assert found[0].report.loss == pytest.approx(found[1].report.loss), "the mean over rows, however units are cut"


def test_persons_are_told_for_each_row() -> None:
    with pytest.raises(ConfigError, match=r"\(3,\) numbers for 4 rows; Return one a training row|\(3,\) numbers"):
        trainer(Line(persons=[1, 2, 3]), PrivateSettings(CLIP, NOISE, 2, "person"))
    with pytest.raises(ConfigError, match="does not tell which samples are of one person"):
        trainer(TwoClasses(), PrivateSettings(CLIP, NOISE, 2, "person"))


@pytest.mark.parametrize("penalties", ["", "l1: 0.3, ", "l1: 0.3, l2: 0.7, "])
def test_penalties_of_a_linear_model_are_of_no_row_and_have_no_noise(penalties: str, random: Fixed) -> None:
    """Lasso and ridge by hand: their terms are added to the noisy mean, neither clipped nor divided by the batch."""
    data = "{kind: sparse, samples: 60, features: 5, informative: 5, nonzeros: 2, target: number}"
    given = f"task={{kind: linear, loss: squared, {penalties}data: {data}}}"
    task = StrategyConfig.load("fedavg", [given]).task.build_by_row()
    cells, targets = (each.numpy() for each in task.data(slot()).train.tensors)  # type: ignore[attr-defined]
    inputs = np.append(cells, np.ones((len(targets), 1)), axis=1)
    start = np.array([0.5, -1.0, 0.25, 1.5, -0.5, 0.125], np.float32)
    gradients = (inputs @ start.astype(np.float64) - targets)[:, None] * inputs
    assert np.linalg.norm(gradients[:3], axis=1).max() > 0.5
    random.units = [[0, 1, 2]]
    found = trainer(task, PrivateSettings(0.5, NOISE, len(targets))).run(order(), start, Cursor())
    noise = NOISE * 0.5 * np.array([1, 1, 1, 1, 1, 2])
    l1, l2 = 0.3 * ("l1" in penalties), 0.7 * ("l2" in penalties)
    penalty = np.append((l1 * np.sign(start) + l2 * start)[:5], 0.0)
    np.testing.assert_allclose(found.update, -((clipped(gradients[:3], 0.5) + noise) / 2 + penalty), 1e-5, 1e-6)


def test_a_penalty_of_a_users_task_is_refused() -> None:
    """Of its class or set at the task: it would get no noise, and nobody sees whether it depends on data."""

    class Telling(TwoClasses):
        def penalty(self, model: nn.Module) -> Tensor | None:
            return model.get_parameter("0.weight").sum() * self.data(slot()).train[0][0].sum()

    line = Line()
    vars(line)["penalty"] = lambda model: model.get_parameter("weight").sum() * INPUTS.sum()
    for telling in (Telling(), line):
        with pytest.raises(ConfigError, match=r"^task\.penalty: it.* may depend on data"):
            trainer(telling)


def test_a_user_s_number_named_penalty_is_no_penalty(random: Fixed) -> None:
    """A task may have such a setting for a loss of its own."""
    found = []
    for settings in ({}, {"penalty": 0.1}):
        task = Line()
        vars(task).update(settings)
        random.units, random.drawn = [[0, 1, 3]], 0
        found.append(trainer(task, SETTINGS).run(order(), START, Cursor()).update)
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.parametrize("loss", ["logistic", "hinge"])
@pytest.mark.parametrize("data", ["{kind: sparse}", "{kind: blobs, blobs: 3}"])
def test_gradients_of_a_linear_model_s_rows_are_those_of_each_alone(loss: str, data: str) -> None:
    """A trainer that is made has compared them."""
    config = StrategyConfig.load("fedavg", [f"task={{kind: linear, loss: {loss}, l2: 0.1, data: {data}}}"])
    assert trainer(config.task.build_by_row()).examples > 100


class TwoParts(Line):
    """A model with a part that the loss leaves out, and one that is frozen."""

    def model(self) -> nn.Module:
        model = nn.ModuleDict({name: nn.Linear(2, 1, bias=False) for name in ("used", "unused", "frozen")})
        model["frozen"].requires_grad_(False)
        model.forward = lambda rows: model["used"](rows) + model["frozen"](rows)  # type: ignore[method-assign]
        return model


def test_parts_without_a_gradient_have_noise_and_frozen_ones_none(random: Fixed) -> None:
    random.units = [[1, 3]]
    subject = trainer(TwoParts(), SETTINGS)
    base = subject.initial_model()
    before = {name: value.clone() for name, value in subject._model.state_dict().items()}
    update = subject.run(order(), base, Cursor()).update
    parts = subject.layout.split(update)
    np.testing.assert_allclose(parts["unused.weight"], [[-NOISE * CLIP * 2 / 2] * 2], rtol=1e-6)
    assert parts["used.weight"].any() and "frozen.weight" not in parts
    assert torch.equal(before["frozen.weight"], subject._model.state_dict()["frozen.weight"])


def test_the_norm_goes_over_all_parts_of_the_model(random: Fixed) -> None:
    """One row's part in the update is at most the clip, over all tensors together."""
    subject = trainer(TwoClasses(), NEARLY_NONE)
    base = subject.initial_model() * 40  # long gradients
    random.units = [[3]]
    update = subject.run(order(batch_size=1), base, Cursor()).update
    assert np.linalg.norm(update) == pytest.approx(CLIP, rel=1e-4)


@pytest.mark.parametrize("spoiled", [math.inf, math.nan, 1e38])
def test_a_row_that_overflows_counts_nothing_and_is_not_told(spoiled: float, random: Fixed) -> None:
    """A lying server sends a model with which one row's loss or gradient is not finite; the order must not fail."""

    class Spoiled(Line):
        def loss(self, model: nn.Module, batch: Batch) -> Tensor:
            scale = torch.where(batch[0][:, :1] == 3, spoiled, 1.0)
            return ((model(batch[0]) - batch[1]).square() * scale).mean()

        def score(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
            errors, right = super().score(model, batch)
            return errors * spoiled, right

    subject = trainer(Line(), SETTINGS)
    subject._task = Spoiled()
    random.units = [[0, 1, 3]]
    found = subject.run(order(evaluate=True), START, Cursor())
    if spoiled == 1e38:  # the norm is infinite, but the gradient is not
        assert np.isfinite(found.update).all()
    else:
        total = row_gradients()[[1, 3]].sum(axis=0)
        np.testing.assert_allclose(found.update, -(total + NOISE * CLIP) / 2, rtol=1e-5)
    assert found.report.loss is not None and math.isfinite(found.report.loss)
    assert found.report.evaluation is not None and found.report.evaluation.correct is not None


def test_an_update_that_is_not_finite_is_refused_without_training_again(random: Fixed) -> None:
    random.units = [[2], [2]]
    with pytest.raises(Diverged):
        trainer(settings=SETTINGS).run(order(1, max_steps=2, learning_rate=3e38), START, Cursor())
    assert random.drawn == 2


@pytest.mark.parametrize("options", [{"optimizer": "adam"}, {"momentum": 0.9}, {"proximal": 0.1}, {"clip_norm": 0.5}])
def test_optimizers_and_terms_of_the_model_alone_go_with_privacy(options: dict[str, Any], random: Fixed) -> None:
    """They change what is done with the noisy gradient: equal noise and no rows give the same update, whatever data."""
    updates = []
    for scale in (1.0, 3.0):

        class Scaled(Line):
            def data(self, slot: SiloSlot, scale: float = scale) -> SiloData:
                return SiloData(*(TensorDataset(INPUTS * scale, TARGETS) for _ in range(2)))

        random.units, random.drawn = [[], []], 0
        updates.append(trainer(Scaled(), SETTINGS, **options).run(order(max_steps=2), START, Cursor()).update)
    assert updates[0].any()
    np.testing.assert_array_equal(*updates)


class Layers(TwoClasses):
    def __init__(self, *layers: nn.Module) -> None:
        self._layers = layers

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), *self._layers, nn.Linear(8, 2))


class Recurrent(nn.Module):
    def __init__(self, cell: type[nn.Module]) -> None:
        super().__init__()
        self.cell, self.last = cell(1, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = self.last(self.cell(rows.unsqueeze(-1))[0][:, -1])
        return found


class Sequences(TwoClasses):
    def __init__(self, cell: type[nn.Module]) -> None:
        self._cell = cell

    def model(self) -> nn.Module:
        return Recurrent(self._cell)


class Weighed(nn.Linear):
    """A layer with parameters and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("scale", torch.ones(8))


@pytest.mark.parametrize(
    ("task", "problem"),
    [
        (Layers(nn.BatchNorm1d(8)), "BatchNorm.*Replace BatchNorm by GroupNorm"),
        (Layers(Weighed()), "hides their gradients.*Weighed"),
        (Sequences(nn.LSTM), "LSTM.*DPLSTM"),
    ],
    ids=["batch norm", "parameters of its own", "LSTM"],
)
def test_layers_whose_rows_have_no_gradients_are_refused_with_their_names(task: Task, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        trainer(task)


@pytest.mark.parametrize(
    "task", [Layers(nn.GroupNorm(2, 8), nn.Dropout(0.5)), Sequences(DPLSTM)], ids=["group norm", "Opacus' LSTM"]
)
def test_layers_that_keep_rows_apart_train(task: Task) -> None:
    subject = trainer(task, PrivateSettings(1.0, 1.0, 40))
    assert subject.run(order(batch_size=8), subject.initial_model(), Cursor()).update.any()


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_trained_parameters_of_sixteen_bits_are_refused_and_frozen_ones_are_not(kind: torch.dtype) -> None:
    """Eight bits of a norm make a clipped gradient up to a percent longer than the clip, and noise as coarse."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].to(kind).requires_grad_(False)
    check_layers(model)
    model[0].requires_grad_(True)
    with pytest.raises(ConfigError, match=rf"0\.weight is {kind}, too coarse.*parameters in float32"):
        check_layers(model)


class Compares(Line):
    """A loss that pulls rows of a batch apart from each other."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        outputs = model(batch[0])
        return super().loss(model, batch) + (outputs - outputs.mean(dim=0)).square().mean()


class Sums(Line):
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return super().loss(model, batch) * len(batch[0])


@pytest.mark.parametrize("task", [Compares(), Sums()])
def test_a_loss_that_is_no_mean_over_rows_is_refused(task: Task) -> None:
    with pytest.raises(ConfigError, match=r"not the mean of the losses of its rows.*Return the mean over rows"):
        trainer(task)


def test_a_loss_that_is_no_tensor_is_refused_in_a_sentence() -> None:
    class Floats(Line):
        def loss(self, model: nn.Module, batch: Batch) -> Any:
            return super().loss(model, batch).item()

    with pytest.raises(ConfigError, match="task, loss: it returned a float in place of a tensor"):
        trainer(Floats(), SETTINGS)


class Counting(nn.Module):
    """A layer that keeps a sum of what it sees."""

    def __init__(self, kind: torch.dtype, rebinds: bool) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2, dtype=kind))
        self.rebinds = rebinds

    def forward(self, rows: Tensor) -> Tensor:
        seen = rows.detach().sum(dim=0).to(self.seen.dtype)
        if self.training and self.rebinds:
            self.seen = self.seen + seen
        elif self.training:
            self.seen += seen
        return rows


class Codebook(nn.Module):
    """A layer that keeps what it sees in weights that get no gradient."""

    def __init__(self, *, trained: bool = True) -> None:
        super().__init__()
        self.book = nn.Linear(2, 1, bias=False).requires_grad_(trained)

    def forward(self, rows: Tensor) -> Tensor:
        if self.training:
            self.book.weight.data.add_(rows.detach().mean(dim=0))
        return rows


@pytest.mark.parametrize(
    ("layers", "what"),
    [
        ([Counting(torch.float32, rebinds=False), nn.Linear(2, 1, bias=False)], "a buffer"),
        ([Counting(torch.int64, rebinds=False), nn.Linear(2, 1, bias=False)], "a buffer"),
        ([Counting(torch.float32, rebinds=True), nn.Linear(2, 1, bias=False)], "a buffer"),
        ([Codebook(), nn.Linear(2, 1, bias=False)], "a parameter"),
        ([Codebook(trained=False), nn.Linear(2, 1, bias=False)], "a buffer"),
    ],
)
def test_values_that_follow_the_data_without_a_gradient_are_refused(
    layers: list[nn.Module], what: str, random: Fixed
) -> None:
    class Kept(Line):
        def model(self) -> nn.Module:
            return nn.Sequential(*layers)

        def parts(self) -> PartPatterns:
            return PartPatterns(share=["*"])

    random.units = [[0, 1]]
    subject = trainer(Kept(), SETTINGS)
    with pytest.raises(ConfigError, match=rf"changes {what}.*GroupNorm"):
        subject.run(order(), subject.initial_model(), Cursor())


@pytest.mark.parametrize(("name", "options"), [("workers", {"workers": 1}), ("precision", {"precision": "fp16"})])
def test_options_without_gradients_of_rows_are_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"local.{name}: .*Leave {name} out"):
        trainer(**options)


def test_a_loop_of_the_user_s_own_is_refused() -> None:
    """Every trainer refuses unless it says otherwise."""
    subject = Trainer(Line(), slot(), LocalOptions(device="cpu"))
    with pytest.raises(ConfigError, match=r"a loop of its own.*Write a task without a loop"):
        subject.make_private(SETTINGS)


def test_nothing_is_trained_before_the_noise_is_chosen() -> None:
    for settings in (None, PrivateSettings(CLIP, None, 4)):
        with pytest.raises(ConfigError, match="has chosen no noise yet"):
            trainer(settings=settings).run(order(), START, Cursor())


def test_a_task_of_a_private_run_has_the_private_trainer() -> None:
    options = LocalOptions(device="cpu", private=True)
    made = trainer_of(StrategyConfig.load("fedavg").task, Silo(0, "a", 1, "cpu"), 3, options)
    assert isinstance(made, private_trainer.PrivateTrainer)
