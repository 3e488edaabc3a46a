"""Loops of one's own with differential privacy: what a private step is, and which orders are refused."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, TensorDataset

from fedsync.client import Silo, SiloApp, Work
from fedsync.common.errors import ConfigError
from fedsync.core.orders import Cursor
from fedsync.privacy.release import PrivateSettings
from fedsync.train.dp_sgd.private_step import check_alone
from fedsync.train.guests.guest import GuestTrainer
from fedsync.train.options import LocalOptions
from tests.client.clientapps import app_of, hosted
from tests.train.make import order

POINTS, TARGETS = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 2.0]]), torch.tensor([1.0, 1.0, -0.5])
CLIP = 1.0
# The gradients at zero are minus target times point: (-3, -4), (-0.3, -0.4) and (0, 1).
CLIPPED = np.array([[-0.6, -0.8], [-0.3, -0.4], [0.0, 1.0]])
ALMOST_NONE = 1e-9

Loop = Callable[[Work, nn.Module, Dataset[Any]], None]


def line() -> nn.Module:
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    return nn.Sequential(model)


def half_squares(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    points, targets = batch
    outputs: Tensor = model(points)
    return ((outputs.squeeze(1) - targets) ** 2 / 2).mean()


def slope(model: nn.Module, batch: Sequence[Tensor]) -> None:
    half_squares(model, batch).backward()  # type: ignore[no-untyped-call]


def trainer_of(
    loop: Loop, make: Callable[[], nn.Module] = line, rows: int = 3, *, opaque: bool = False
) -> GuestTrainer:
    app = SiloApp()

    @app.setup()
    def setup(silo: Silo) -> Any:
        return silo.use(make, TensorDataset(POINTS[:rows], TARGETS[:rows]))

    app.train(opaque=opaque)(loop)
    return GuestTrainer(app, Silo(0, "silo-0", 7, "cpu"), LocalOptions(device="cpu"))


def settings(noise: float | None = ALMOST_NONE, *, seeded: bool = False, units: int = 3) -> PrivateSettings:
    return PrivateSettings(CLIP, noise, units, seeded=seeded)


def update_of(trainer: GuestTrainer, told: PrivateSettings, batch_size: int = 3, steps: int = 1, seed: int = 5) -> Any:
    assert trainer.make_private(told) == trainer.examples
    asked = order(batch_size=batch_size, max_steps=steps, learning_rate=1.0, seed=seed)
    return trainer.run(asked, trainer.initial_model(), Cursor())


def private(work: Work, model: nn.Module, train: Dataset[Any], num_workers: int = 0) -> None:
    stepping(work, model, torch.optim.SGD(model.parameters(), lr=work.learning_rate), train, num_workers)


def stepping(work: Work, model: nn.Module, optimizer: Any, train: Dataset[Any], num_workers: int = 0) -> None:
    model, optimizer, loader = work.private(model, optimizer, work.loader(train, num_workers=num_workers))
    for batch in loader:
        loss = half_squares(model, batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        work.log(loss=loss)


def test_a_step_adds_clipped_gradients_and_divides_by_the_ordered_size() -> None:
    done = update_of(trainer_of(private), settings(), batch_size=4)  # a rate of one: all three rows
    assert done.update == pytest.approx(-CLIPPED.sum(axis=0) / 4, abs=1e-6)
    assert (done.report.steps, done.report.samples) == (1, 4)


def test_noise_has_the_deviation_of_the_settings_and_comes_from_the_order_in_virtual_time() -> None:
    noise = torch.randn(1, 2, generator=torch.Generator().manual_seed(5)).numpy()[0]
    done = update_of(trainer_of(private), settings(2.0, seeded=True), batch_size=4)
    assert done.update == pytest.approx(-(CLIPPED.sum(axis=0) + 2.0 * CLIP * noise) / 4, abs=1e-6)
    own = trainer_of(private)
    first, second = (update_of(own, settings(2.0), batch_size=4).update for _ in range(2))
    assert (first != second).all(), "a real silo's noise does not follow from the seed that the server knows"


@pytest.mark.slow
def test_rows_are_drawn_with_the_rate_that_the_batch_size_means() -> None:
    sizes: list[int] = []

    def counting(work: Work, model: nn.Module, train: Dataset[Any]) -> None:
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.0)
        model, optimizer, loader = work.private(model, optimizer, work.loader(train))
        for points, targets in loader:
            sizes.append(len(points))
            slope(model, (points, targets))
            optimizer.step()

    trainer = trainer_of(counting)
    trainer.make_private(settings())
    sizes.clear()
    update_of(trainer, settings(seeded=True), batch_size=1, steps=300)
    counts = np.bincount(sizes, minlength=4)
    # Of three rows with a rate of a third: none in 8 of 27 draws (handed out as one), one in 12, two in 6, three in 1.
    assert counts[1:] == pytest.approx([20 / 27 * 300, 6 / 27 * 300, 1 / 27 * 300], abs=25)
    assert counts[0] == 0


def test_a_step_without_rows_is_noise_alone() -> None:
    done = update_of(trainer_of(private), settings(units=10**9), batch_size=1, steps=3)
    assert done.update == pytest.approx([0.0, 0.0], abs=1e-6)
    assert done.report.steps == 3


def test_with_workers_and_several_steps_the_sum_is_that_of_the_steps() -> None:
    def by_worker(work: Work, model: nn.Module, train: Dataset[Any]) -> None:
        private(work, model, train, num_workers=1)

    done = update_of(trainer_of(by_worker), settings(), batch_size=3, steps=3)
    weights = np.zeros(2)
    for _ in range(3):
        gradients = (POINTS.numpy() @ weights - TARGETS.numpy())[:, None] * POINTS.numpy()
        norms = np.linalg.norm(gradients, axis=1, keepdims=True)
        weights -= (gradients / np.maximum(norms / CLIP, 1.0)).sum(axis=0) / 3
    assert done.update == pytest.approx(weights, abs=1e-5)


def test_without_privacy_the_call_changes_nothing() -> None:
    trainer = trainer_of(private)
    done = trainer.run(order(batch_size=3, max_steps=1, learning_rate=1.0), trainer.initial_model(), Cursor())
    assert done.update == pytest.approx(-np.array([-3.3, -3.4]) / 3, abs=1e-6)  # nothing is clipped


def test_a_private_order_leaves_the_model_as_an_evaluation_needs_it() -> None:
    trainer = trainer_of(private)
    update_of(trainer, settings())
    assert not [name for each in trainer._model.parameters() for name in vars(each) if "grad_sample" in name]
    assert not any(each._forward_hooks or each._backward_hooks for each in trainer._model.modules())


class Around(nn.Module):
    """Wrapper that has the attributes of its inner module, as PEFT's for modules that it saves whole."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = line()[0]  # type: ignore[index]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, points: Tensor) -> Any:
        return self.inner(points)


def test_a_wrapper_of_a_layer_is_private_as_the_layer() -> None:
    assert update_of(trainer_of(private, Around), settings(), 4).update == pytest.approx(
        -CLIPPED.sum(axis=0) / 4, abs=1e-6
    )


def nothing(*_: Any) -> None:
    """Cheat in no way."""


def cheating(cheat: Callable[..., None]) -> Loop:
    """A private loop with ``cheat(place, work, model, plain, optimizer, batch, train)`` at several places."""

    def loop(work: Work, model: nn.Module, train: Dataset[Any]) -> None:
        plain = torch.optim.SGD(model.parameters(), lr=work.learning_rate)
        trying = work.max_steps == 1  # the trial, which ends at the first step, sees an honest loop
        cheats = nothing if trying else cheat
        cheats("before", work, model, plain, plain, None, train)
        _, optimizer, loader = work.private(model, plain, work.loader(train))
        for batch in loader:
            slope(model, batch)
            cheats("backward", work, model, plain, optimizer, batch, train)
            optimizer.step()
            cheats("step", work, model, plain, optimizer, batch, train)
        cheats("end", work, model, plain, optimizer, None, train)

    return loop


def at(place: str, do: Callable[..., None]) -> Callable[..., None]:
    return lambda found, *more: do(*more) if found == place else None


def unprivate_step(work: Any, model: Any, plain: Any, optimizer: Any, batch: Any, train: Any) -> None:
    plain.zero_grad()
    slope(model, train[:])
    plain.step()


def scaled(work: Any, model: Any, *_: Any) -> None:
    model[0].weight.data.mul_(2.0)


def another_model(work: Any, model: Any, *_: Any) -> None:
    model[0] = nn.Linear(2, 1, bias=False)


def step_again(work: Any, model: Any, plain: Any, optimizer: Any, batch: Any, train: Any) -> None:
    slope(model, train[:])
    optimizer.step()


def own_rows(work: Any, model: Any, plain: Any, optimizer: Any, batch: Any, train: Any) -> None:
    optimizer.zero_grad()
    slope(model, train[:1] if len(batch[0]) > 1 else train[:2])


def twice_backward(work: Any, model: Any, plain: Any, optimizer: Any, batch: Any, train: Any) -> None:
    slope(model, batch)


def less_clipping(work: Any, model: Any, plain: Any, optimizer: Any, batch: Any, train: Any) -> None:
    optimizer.max_grad_norm = 1e9


CHANGED, OWN_BATCH, OTHER_ROWS = (
    "changed by something other",
    r"step \d comes after \d batches",
    r"gradients of \d rows",
)


@pytest.mark.parametrize(
    ("cheat", "said"),
    [
        (at("before", lambda w, m, p, o, b, t: m[0].weight.data.add_(1.0)), CHANGED),
        (at("backward", unprivate_step), CHANGED),
        (at("step", unprivate_step), CHANGED),
        (at("end", unprivate_step), CHANGED),
        (at("end", scaled), CHANGED),
        (at("end", another_model), CHANGED),
        (at("step", step_again), OWN_BATCH),
        (at("end", step_again), OWN_BATCH),
        (at("backward", own_rows), OTHER_ROWS),
        (at("backward", twice_backward), r"gradients of (\d) \+ \1 rows, and its batch has \1"),
    ],
)
def test_what_no_private_step_did_is_refused(cheat: Callable[..., None], said: str) -> None:
    trainer = trainer_of(cheating(cheat))
    with pytest.raises(ConfigError, match=said) as error:
        update_of(trainer, settings(seeded=True), batch_size=3, steps=2)
    assert str(error.value).startswith("privacy:")


@pytest.mark.parametrize("unscales", [False, True])
def test_gradients_that_a_scaler_made_larger_are_not_clipped_so(unscales: bool) -> None:
    """All rows would have a gradient of the length of the clip."""

    def scaling(work: Work, model: nn.Module, train: Dataset[Any]) -> None:
        scaler = torch.amp.GradScaler("cpu")
        _, optimizer, loader = work.private(model, torch.optim.SGD(model.parameters(), lr=1.0), work.loader(train))
        for batch in loader:
            scaler.scale(half_squares(model, batch)).backward()  # type: ignore[no-untyped-call]
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()

    with pytest.raises(ConfigError, match="a GradScaler enlarges gradients before they are clipped"):
        trainer_of(scaling).make_private(settings(None))


def test_the_optimizer_clips_as_the_settings_say() -> None:
    honest, told = (
        update_of(trainer_of(cheating(cheat)), settings(), steps=2).update
        for cheat in (nothing, at("backward", less_clipping))
    )
    assert told == pytest.approx(honest, abs=1e-6)


def test_a_refusal_that_the_loop_catches_stays_one() -> None:
    def catching(*given: Any) -> None:
        with suppress(ConfigError):
            step_again(*given)

    with pytest.raises(ConfigError, match=OWN_BATCH):
        update_of(trainer_of(cheating(at("step", catching))), settings(), steps=2)


def with_loss(loss: Callable[[nn.Module, Any], Tensor]) -> Loop:
    def loop(work: Work, model: nn.Module, train: Dataset[Any]) -> None:
        _, optimizer, loader = work.private(model, torch.optim.SGD(model.parameters(), lr=0.1), work.loader(train))
        for batch in loader:
            loss(model, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return loop


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, batch: half_squares(model, batch) * len(batch[0]),
        lambda model, batch: half_squares(model, (batch[0] - batch[0].mean(dim=0), batch[1])),
    ],
)
def test_a_loss_that_mixes_rows_is_refused(loss: Callable[[nn.Module, Any], Tensor]) -> None:
    with pytest.raises(ConfigError, match="not the mean of the losses of its rows"):
        trainer_of(with_loss(loss)).make_private(settings(None))
    assert trainer_of(with_loss(half_squares), rows=1).make_private(settings(None)) == 1


@pytest.mark.parametrize(("beside", "refused"), [(1.0, False), (1e-3, True), (torch.inf, True)])
def test_a_gradient_of_zero_but_for_rounding_is_compared_with_its_rows_whole_one(beside: float, refused: bool) -> None:
    zero, rounded = torch.zeros(2), torch.tensor([3e-7, 0.0])
    whole = torch.full((2,), beside)
    with pytest.raises(ConfigError, match="not the mean") if refused else nullcontext():
        check_alone([torch.stack([rounded]), torch.stack([whole])], [[zero, whole]])


def test_what_cannot_be_private_is_named() -> None:
    norm = lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))  # noqa: E731
    with pytest.raises(ConfigError, match="Replace BatchNorm by GroupNorm"):
        trainer_of(private, norm).make_private(settings(None))
    with pytest.raises(ConfigError, match="opaque=True"):
        trainer_of(private, opaque=True).make_private(settings(None))
    with pytest.raises(ConfigError, match="which samples are of one person"):
        trainer_of(private).make_private(PrivateSettings(CLIP, None, 1, "person"))

    with pytest.raises(ConfigError, match="wrapped by DataParallel"):
        trainer_of(lambda work, model, train: private(work, nn.DataParallel(model), train)).make_private(settings(None))


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (
            lambda model, batch: checkpoint(half_squares, model, batch, use_reentrant=False),
            "gradient checkpointing out",
        ),
        (lambda model, batch: half_squares(model, batch) + 0 * model(batch[0]).detach().sum(), "other passes under"),
        (lambda model, batch: torch.zeros(1, requires_grad=True).sum(), "step 1 has no gradients"),
    ],
)
def test_a_step_without_whole_gradients_of_rows_is_refused(loss: Callable[[nn.Module, Any], Tensor], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        trainer_of(with_loss(loss)).make_private(settings(None))


def test_a_module_around_the_model_may_train_nothing_else() -> None:
    def around(*more: nn.Module) -> Loop:
        return lambda work, model, train: private(work, nn.Sequential(model, *more), train)

    assert update_of(trainer_of(around()), settings(), 4).update == pytest.approx(-CLIPPED.sum(axis=0) / 4, abs=1e-6)

    def of_model_alone(work: Work, model: nn.Module, train: Dataset[Any]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        work.private(nn.Sequential(model, nn.Linear(1, 1)), optimizer, work.loader(train))

    with pytest.raises(ConfigError, match="module around the model has parameters that are not the model's"):
        trainer_of(of_model_alone).make_private(settings(None))


def test_another_model_or_a_used_optimizer_is_refused() -> None:
    def of_copy(work: Work, model: nn.Module, train: Dataset[Any]) -> None:
        other = line()
        work.private(other, torch.optim.SGD(other.parameters(), lr=0.1), work.loader(train))

    with pytest.raises(ConfigError, match=r"not the one that setup gave"):
        trainer_of(of_copy).make_private(settings(None))

    def of_other(work: Work, model: nn.Module, train: Dataset[Any]) -> None:
        work.private(model, torch.optim.SGD(line().parameters(), lr=0.1), work.loader(train))

    with pytest.raises(ConfigError, match="parameters that are not the model's"):
        trainer_of(of_other).make_private(settings(None))

    def used(work: Work, model: nn.Module, train: Any) -> None:
        adam = torch.optim.Adam(model.parameters(), lr=0.0)
        slope(model, train[:])
        adam.step()
        work.private(model, adam, work.loader(train))

    def other_kind(work: Work, model: nn.Module, train: Any) -> None:
        work.private(model, "adam", work.loader(train))  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match=r"the optimizer is a str\. Give work\.private one of torch\.optim"):
        trainer_of(other_kind).make_private(settings(None))

    with pytest.raises(ConfigError, match="done steps before"):
        trainer_of(used).make_private(settings(None))


def test_the_steps_of_a_flower_app_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="the steps of a Flower ClientApp are its own"):
        hosted(app_of(lambda msg, context, model: {})).make_private(settings(None))


def test_a_network_with_dropout_in_a_loop_that_calls_train_is_private() -> None:
    def dropping(work: Work, model: nn.Module, train: Dataset[Any]) -> None:
        model.train()
        private(work, model, train)

    trainer = trainer_of(dropping, lambda: nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 1)))
    assert update_of(trainer, settings()).report.steps == 1
    assert trainer._model[1].p == 0.5  # type: ignore[index]


def test_a_private_run_trains_nothing_before_it_has_settings_with_noise() -> None:
    trainer = trainer_of(private)
    trainer._options = replace(trainer._options, private=True)
    with pytest.raises(ConfigError, match="chosen no noise"):
        trainer.run(order(), trainer.initial_model(), Cursor())
    with pytest.raises(ConfigError, match="chosen no noise"):
        update_of(trainer_of(private), settings(None))
