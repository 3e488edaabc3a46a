"""A training loop of one's own, hosted: its steps are the order's, its update is what its own loop makes."""

import json
import os
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from fedsync.client import Silo, SiloApp, Work
from fedsync.common.errors import ConfigError, Diverged, RunError
from fedsync.core.orders import Cursor, UpdateMeta
from fedsync.core.report_checks import check_report
from fedsync.core.speed.curve import Curve
from fedsync.train.batches import Sampler
from fedsync.train.guests.guest import MOST_STATE, GuestTrainer
from fedsync.train.loop import Trainer
from fedsync.train.options import LocalOptions
from fedsync.train.silo_trainer import Throttle
from tests.train.make import EXAMPLES, Clock, TwoClasses, order, slot

OPTIONS = LocalOptions(device="cpu")
SITE = Silo(0, "silo-0", 7, "cpu", node_config={"site": "north"}, options={"width": 3})


def app_of(loop: Any, **more: Any) -> SiloApp:
    """An app on the data of `TwoClasses` with this loop; ``loop`` takes work, model and train."""
    app = SiloApp()
    task = TwoClasses()
    data = task.data(slot())

    @app.setup()
    def setup(silo: Silo) -> Any:
        return silo.use(task.model, data.train, data.test, **more)

    app.train()(loop)
    return app


def trainer(loop: Any, **more: Any) -> GuestTrainer:
    return GuestTrainer(app_of(loop, **more), SITE, OPTIONS)


def plain_sgd(work: Work, model: nn.Module, train: Dataset[Any]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=work.learning_rate)
    for inputs, labels in work.loader(train):
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        work.log(loss=loss)


def test_a_loop_like_the_shipped_one_makes_the_same_update() -> None:
    shipped, guest = Trainer(TwoClasses(), slot(), OPTIONS), trainer(plain_sgd)
    assert (guest.initial_model() == shipped.initial_model()).all()
    cursors = Cursor(), Cursor()
    for number in range(3):
        what = order(batch_size=7, max_steps=9, seed=number)
        ours, theirs = (
            each.run(what, each.initial_model(), cursor) for each, cursor in zip((shipped, guest), cursors, strict=True)
        )
        assert theirs.update == pytest.approx(ours.update, rel=1e-6, abs=1e-9)
        assert theirs.report.loss == pytest.approx(ours.report.loss, rel=1e-6)
        assert (theirs.report.steps, theirs.report.samples) == (9, 63)
        assert (theirs.cursor.epoch, theirs.cursor.position) == (ours.cursor.epoch, ours.cursor.position)
        cursors = ours.cursor, theirs.cursor


@pytest.mark.parametrize("counts", [False, True])
def test_steps_count_and_are_timed_where_the_loop_keeps_its_iterator(counts: bool) -> None:
    kept: list[Any] = []

    def loop(work: Work, model: nn.Module, train: Dataset[Any]) -> None:
        kept.append(work.counter() if counts else iter(work.loader(train)))
        for _ in range(3):
            next(kept[-1])

    guest = trainer(loop)
    report = guest.run(order(batch_size=5, max_steps=3), guest.initial_model(), Cursor()).report
    assert report.steps == 3 - counts and report.compute_s > 0.0 and report.windows


def test_a_thread_that_goes_on_after_the_function_is_refused() -> None:
    inside, over = threading.Event(), threading.Event()

    def batches() -> Iterator[int]:
        inside.set()
        yield over.wait()

    def loop(work: Work, model: nn.Module, train: Dataset[Any]) -> None:
        threading.Thread(target=list, args=(work.batches(batches()),)).start()
        inside.wait()

    guest = trainer(loop)
    with pytest.raises(ConfigError, match="a thread still takes batches of the order"):
        guest.run(order(), guest.initial_model(), Cursor())
    over.set()


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": False}])
def test_batches_are_the_orders_and_what_was_only_fetched_comes_again(options: dict[str, Any]) -> None:
    seen: list[int] = []

    def loop(work: Work, model: nn.Module, train: Dataset[Any]) -> None:
        for (numbers,) in work.loader(numbered, **options):
            seen.extend(numbers.tolist())

    numbered = TensorDataset(torch.arange(EXAMPLES))
    guest = trainer(loop)
    first = guest.run(
        order(batch_size=5, max_steps=6), guest.initial_model(), Cursor(), watch=lambda steps, _: steps < 2
    )
    assert (first.report.steps, first.report.samples) == (2, 10)
    guest.run(order(batch_size=5, max_steps=3), guest.initial_model(), first.cursor)
    assert seen == Sampler(EXAMPLES, 7, "silo-0").take(Cursor(), 25)[0].tolist()


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": False}])
def test_a_loop_of_several_passes_goes_on_after_the_last_step(options: dict[str, Any]) -> None:
    seen: list[int] = []

    def loop(work: Work, model: nn.Module, train: Dataset[Any]) -> None:
        steps, loader = work.counter(), work.loader(TensorDataset(torch.arange(EXAMPLES)), **options)
        next(steps)
        for _ in range(3):  # of 2, 2 and 1 steps; as libraries do, it fetches a batch more than it trains on
            for number, (numbers,) in enumerate(loader):
                if number == 2:
                    break
                seen.extend(numbers.tolist())
                next(steps, None)

    guest = trainer(loop)
    assert guest.run(order(batch_size=5, max_steps=5), guest.initial_model(), Cursor()).report.steps == 5
    assert seen == Sampler(EXAMPLES, 7, "silo-0").take(Cursor(), 25)[0].tolist()


def test_workers_stay_while_the_data_set_is_the_same() -> None:
    class Readers(Dataset[int]):
        def __init__(self, inner: Any = None) -> None:
            self.inner, self.top = inner, 1.5

        def __len__(self) -> int:
            return EXAMPLES

        def __getitem__(self, row: int) -> int:
            return os.getpid()

    seen: list[set[int]] = []

    def loop(work: Work, model: nn.Module, train: Dataset[Any]) -> None:
        loader = work.loader(reads[-1], num_workers=1, **options)
        seen.append({number for batch in loader for number in batch.tolist()})

    def reading() -> set[int]:
        guest.run(order(), guest.initial_model(), Cursor())
        return seen[-1]

    guest, options, same = trainer(loop), dict[str, Any](), Readers()
    reads = [Readers(inner=same)]
    first = reading()
    assert len(first) == 1 and os.getpid() not in first
    same.top = float("1.5")  # an equal one
    assert reading() == first
    same.top = 2.5
    second = reading()
    assert second != first, "they would read a data set as it was"
    reads.append(Readers(inner=same))
    third = reading()
    assert third != second
    options["persistent_workers"] = False
    assert reading() != reading() != third


def test_the_loop_ends_with_its_budget_and_a_second_one_finds_nothing() -> None:
    left: list[float | None] = []

    def loop(work: Work, model: nn.Module, train: Dataset[Any]) -> None:
        left.append(work.deadline)
        for _ in work.loader(train):
            left.append(work.deadline)

    guest = trainer(loop)
    outcome = guest.run(order(max_steps=50, budget_s=0.0), guest.initial_model(), Cursor())
    assert outcome.report.steps == 1, "one step at least, and no second one after the time is up"
    assert left == [0.0, 0.0]

    def twice(work: Work, model: nn.Module, train: Dataset[Any]) -> None:
        for _ in range(2):
            for _ in work.loader(train):
                pass

    guest = trainer(twice)
    with pytest.raises(ConfigError, match="second loop over batches"):
        guest.run(order(), guest.initial_model(), Cursor())


def test_a_loop_that_is_left_early_has_done_the_step_in_which_it_was() -> None:
    def loop(work: Work, model: nn.Module, train: Dataset[Any]) -> None:
        for number, _ in enumerate(work.loader(train)):
            if number == 2:
                break

    guest = trainer(loop)
    outcome = guest.run(order(batch_size=4, max_steps=9), guest.initial_model(), Cursor())
    assert (outcome.report.steps, outcome.report.samples, outcome.cursor.position) == (3, 12, 12)


def test_batches_of_ones_own_count_too() -> None:
    def loop(work: Work, model: nn.Module, train: Dataset[Any]) -> None:
        for number in work.batches(iter(int, 1)):
            work.log(loss=1.0, dice=0.25 + number)

    guest = trainer(loop)
    report = guest.run(order(batch_size=4, max_steps=5), guest.initial_model(), Cursor()).report
    assert (report.steps, report.samples, report.loss) == (5, 20, 1.0)
    assert report.metrics["dice"] == 0.25


@pytest.mark.parametrize(("budget_s", "steps"), [(None, 6), (2.5, 3)])
def test_a_validation_is_no_training_time(budget_s: float | None, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 0.1 s, and a second of something else after each: the balancer sees the steps, the deadline all."""
    clock = Clock(monkeypatch, step_s=0.0)

    def loop(work: Work, model: nn.Module, train: Dataset[Any]) -> None:
        with work.untimed():  # before the first batch there is no clock to stop
            clock.now_s += 5.0
        for _ in work.loader(train):
            clock.now_s += 0.1
            with work.untimed(), work.untimed():
                clock.now_s += 1.0

    guest = trainer(loop)
    throttle = Throttle(Curve(speed=80.0), fastest_ratio=1.0)  # as slow as the steps are
    report = guest.run(order(max_steps=6, budget_s=budget_s), guest.initial_model(), Cursor(), throttle=throttle).report
    assert report.steps == steps
    assert report.compute_s == pytest.approx(0.1 * steps)
    assert report.overhead_s["evaluate"] == pytest.approx(1.0 * steps)
    assert [window.speed for window in report.windows] == pytest.approx([8 / 0.1] * steps)


@pytest.mark.parametrize("error", [OSError, SystemExit])
def test_state_goes_on_and_an_order_that_fails_leaves_it(error: type[BaseException]) -> None:
    def loop(work: Work, model: nn.Module, train: Dataset[Any], fail: list[bool]) -> None:
        work.state["orders"] = work.state.get("orders", 0) + 1
        for _ in work.loader(train):
            pass
        if fail:
            raise error("the disk is gone")

    fail: list[bool] = []
    guest = trainer(loop, fail=fail)
    cursor = guest.run(order(), guest.initial_model(), Cursor()).cursor
    fail.append(True)
    with pytest.raises(RunError, match=rf"test_own_loop.py, line \d+: {error.__name__}: the disk is gone"):
        guest.run(order(), guest.initial_model(), cursor)
    fail.clear()
    assert json.loads(guest.run(order(), guest.initial_model(), cursor).cursor.state) == {"orders": 2}


def test_a_state_that_a_loop_replaces_goes_on_too() -> None:
    def loop(work: Work, model: nn.Module, train: Dataset[Any]) -> None:
        work.state = {"orders": work.state.get("orders", 0) + 1}
        for _ in work.loader(train):
            pass

    guest, cursor = trainer(loop), Cursor()
    for _ in range(2):
        cursor = guest.run(order(), guest.initial_model(), cursor).cursor
    assert json.loads(cursor.state) == {"orders": 2}


def test_a_logged_tensor_of_samples_counts_with_its_mean_and_no_number_is_an_error_with_its_line() -> None:
    def loop(work: Work, model: nn.Module, train: Dataset[Any]) -> None:
        for inputs, labels in work.loader(train):
            work.log(loss=nn.functional.cross_entropy(model(inputs), labels, reduction="none"), right=labels >= 0)
            work.log(**more)

    more, guest = dict[str, Any](), trainer(loop)
    report = guest.run(order(), guest.initial_model(), Cursor()).report
    plain = trainer(lambda work, model, train: [
        work.log(loss=nn.functional.cross_entropy(model(inputs), labels)) for inputs, labels in work.loader(train)
    ])  # fmt: skip
    assert report.loss == pytest.approx(plain.run(order(), guest.initial_model(), Cursor()).report.loss)
    assert report.metrics["right"] == 1.0
    more["dice"] = "0.9"
    with pytest.raises(RunError, match=r"test_own_loop.py, line \d+: TypeError"):
        guest.run(order(), guest.initial_model(), Cursor())


@pytest.mark.parametrize(
    ("value", "problem"), [({1, 2}, "cannot be kept"), (float("nan"), "cannot be kept"), ("x" * MOST_STATE, "at most")]
)
def test_a_state_that_cannot_be_kept_is_refused(value: object, problem: str) -> None:
    def loop(work: Work, model: nn.Module, train: Dataset[Any]) -> None:
        work.state["own"] = value
        for _ in work.loader(train):
            pass

    guest = trainer(loop)
    with pytest.raises(ConfigError, match=problem):
        guest.run(order(), guest.initial_model(), Cursor())


def test_a_repeated_order_gives_the_same_bits_whatever_random_numbers_it_draws() -> None:
    def loop(work: Work, model: nn.Module, train: Dataset[Any]) -> None:
        for _ in work.loader(train):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += torch.randn(()) + random.random() + np.random.rand()

    guest, updates = trainer(loop), []
    for _ in range(2):
        _ = torch.rand(()), random.random(), np.random.rand()  # drawn by others meanwhile
        before = np.random.get_state()[1].tolist()  # type: ignore[union-attr]
        updates.append(guest.run(order(seed=3), guest.initial_model(), Cursor()).update)
        assert np.random.get_state()[1].tolist() == before, "others' random numbers are theirs"  # type: ignore[union-attr]
    assert (updates[0] == updates[1]).all()


def test_gradients_that_an_order_leaves_do_not_reach_the_next() -> None:
    def loop(work: Work, model: nn.Module, train: Dataset[Any]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=work.learning_rate)
        for number, (inputs, labels) in enumerate(work.loader(train), start=1):
            nn.functional.cross_entropy(model(inputs), labels).backward()
            if number % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()

    guest = trainer(loop)
    first, again = (guest.run(order(max_steps=5), guest.initial_model(), Cursor()).update for _ in range(2))
    assert first.any() and (again == first).all()


def test_what_is_not_finite_has_diverged() -> None:
    def loop(work: Work, model: nn.Module, train: Dataset[Any]) -> None:
        for _ in work.loader(train):
            work.log(loss=float("nan"))

    guest = trainer(loop)
    with pytest.raises(Diverged):
        guest.run(order(), guest.initial_model(), Cursor())


def test_a_metric_that_cannot_be_sent_costs_no_update() -> None:
    """A server refuses the whole report for one NaN, such as the AUC of a batch with one class."""

    def loop(work: Work, model: nn.Module, train: Dataset[Any]) -> None:
        for _ in work.loader(train):
            work.log(loss=0.5, auc=float("nan"), huge=1e31, dice=0.25)
            work.log(**{f"other_{number}": 1.0 for number in range(40)})

    asked, guest = order(), trainer(loop)
    report = guest.run(asked, guest.initial_model(), Cursor()).report
    meta = UpdateMeta.of("silo-0", asked, report, EXAMPLES, nbytes=4)
    check_report("silo-0", asked, meta, report)
    assert report.loss == 0.5 and report.metrics["dice"] == 0.25 and not {"auc", "huge"} & report.metrics.keys()
