"""Two processes' parts of an order, here in two threads: together they do the steps that one process would do."""

import threading
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsync.core.orders import Cursor, WorkOrder
from fedsync.evaluation.metrics.named import Wanted
from fedsync.model.layout import Vector
from fedsync.model.tensor_parts import UNSAID, PartPatterns
from fedsync.tasks.task_protocol import Batch, SiloData, SiloSlot, Task
from fedsync.train.batches import Sampler
from fedsync.train.loop import Trainer
from fedsync.train.options import LocalOptions, Schedule
from fedsync.train.processes.rank import Rank
from fedsync.train.silo_trainer import Outcome, Watch
from tests.train.make import Cramped, TwoClasses, order, slot, trainer

CPU = torch.device("cpu")
TOLERANCE = 1e-6


class Parts:
    """Trainers that each do their share, the first of them here and the others in threads."""

    def __init__(self, folder: Path, tasks: list[Task], options: LocalOptions, run: PartPatterns = UNSAID) -> None:
        self.trainers = [Trainer(task, slot(), options, run) for task in tasks]
        self._each(lambda number: self._meet(number, folder))

    def run(self, work: WorkOrder, base: Vector, cursor: Cursor | None = None, watch: Watch | None = None) -> Outcome:
        where, outcomes = cursor or Cursor(), []

        def part(number: int) -> None:
            if number:
                self.trainers[number].follow(work, base, where)
            else:
                outcomes.append(self.trainers[0].run(work, base, where, watch=watch))

        self._each(part)
        (outcome,) = outcomes
        return outcome

    def models(self) -> list[Vector]:
        """What each has come to."""
        return [each._weights.read() for each in self.trainers]

    def _meet(self, number: int, folder: Path) -> None:
        self.trainers[number].rank = Rank(number, len(self.trainers), folder, CPU)

    def _each(self, part: Callable[[int], None]) -> None:
        failed: list[BaseException] = []

        def kept(number: int) -> None:
            try:
                part(number)
            except BaseException as error:
                failed.append(error)

        # Daemons: where the first fails the others wait for it, for a day.
        threads = [threading.Thread(target=kept, args=(n,), daemon=True) for n in range(1, len(self.trainers))]
        for thread in threads:
            thread.start()
        part(0)
        for thread in threads:
            thread.join(30)
        assert not failed, failed


def parts(
    folder: Path,
    options: LocalOptions,
    make: Callable[[], Task] = TwoClasses,
    count: int = 2,
    run: PartPatterns = UNSAID,
) -> Parts:
    return Parts(folder, [make() for _ in range(count)], options, run)


class Branches(Task):
    """A layer that only rows with a large first value reach, and one that none does."""

    def model(self) -> nn.Module:
        return nn.ModuleDict({"all": nn.Linear(4, 2), "some": nn.Linear(4, 2), "none": nn.Linear(4, 2)})

    def data(self, slot: SiloSlot) -> SiloData:
        return TwoClasses().data(slot)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, labels = batch
        layers = dict(model.named_children())
        logits = layers["all"](inputs)
        if (large := inputs[:, 0] > 1.0).any():
            logits = logits + layers["some"](inputs) * large[:, None]
        return nn.functional.cross_entropy(logits, labels)

    def score(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        return super().score(model.get_submodule("all"), batch)


class Normed(TwoClasses):
    """Keeps a running mean of its batches, and a constant."""

    def model(self) -> nn.Module:
        model = nn.Sequential(nn.BatchNorm1d(4, momentum=1.0), nn.Linear(4, 2))
        model.register_buffer("mask", torch.tensor([-torch.inf, 0.1]), persistent=False)
        return model


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [8, 7, 2, 1])
@pytest.mark.parametrize("count", [2, 3])
def test_the_update_is_that_of_one_process_however_the_batch_divides(
    batch_size: int, count: int, tmp_path: Path
) -> None:
    options = LocalOptions(device="cpu")
    alone, group = trainer(), parts(tmp_path, options, count=count)
    work, base = order(batch_size=batch_size, max_steps=20, evaluate=True), alone.initial_model()
    expected, found = alone.run(work, base, Cursor(1, 3)), group.run(work, base, Cursor(1, 3))
    assert np.abs(expected.update).max() > 0.01
    np.testing.assert_allclose(found.update, expected.update, rtol=0, atol=TOLERANCE)
    assert found.report.loss == pytest.approx(expected.report.loss, rel=TOLERANCE)
    assert found.report.samples == 20 * batch_size and found.cursor == expected.cursor
    first, *others = group.models()
    assert all(np.array_equal(first, other) for other in others), "all hold the same model, to the last bit"
    scored, alike = found.report.evaluation, expected.report.evaluation
    assert scored is not None and alike is not None
    assert (scored.samples, scored.correct) == (alike.samples, alike.correct) == (10, alike.correct)
    assert scored.loss == pytest.approx(alike.loss, rel=TOLERANCE)


@pytest.mark.parametrize(
    "options",
    [
        LocalOptions(momentum=0.9, weight_decay=0.01, device="cpu"),
        LocalOptions({"kind": "adamw", "betas": [0.9, 0.98]}, device="cpu"),
        LocalOptions(accumulate=3, clip_norm=0.1, device="cpu"),
        LocalOptions(proximal=0.5, schedule=Schedule("cosine", warmup=2), device="cpu"),
    ],
    ids=["sgd", "adamw", "pieces", "proximal"],
)
def test_whatever_follows_the_gradients_goes_by_all_rows(options: LocalOptions, tmp_path: Path) -> None:
    alone, group = trainer(None, 0, options), parts(tmp_path, options)
    work, base = order(batch_size=7, max_steps=15, learning_rate=0.02), alone.initial_model()
    expected = alone.run(work, base, Cursor()).update
    np.testing.assert_allclose(group.run(work, base).update, expected, rtol=0, atol=1e-5)


def test_a_layer_that_few_rows_reach_gets_their_gradient_and_one_that_none_does_stays(tmp_path: Path) -> None:
    options = LocalOptions(weight_decay=0.1, device="cpu")
    alone, group = trainer(Branches(), 0, options), parts(tmp_path, options, Branches)
    # One row of each batch, so that it is often the only one of its kind.
    work, base = order(batch_size=2, max_steps=20), alone.initial_model()
    expected, found = alone.run(work, base, Cursor()).update, group.run(work, base).update
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
    changes = alone.layout.split(found)
    assert np.abs(changes["some.weight"]).max() > 0
    assert not changes["none.weight"].any(), "a gradient of 0 would let the weights decay"


def test_the_first_process_decides_when_an_order_ends(tmp_path: Path) -> None:
    alone, group = trainer(), parts(tmp_path, LocalOptions(device="cpu"))
    base, seen = alone.initial_model(), []

    def watch(steps: int, samples: int) -> bool:
        seen.append((steps, samples))
        return steps < 3

    halted = group.run(order(max_steps=10**6), base, watch=watch)
    assert seen == [(1, 8), (2, 16), (3, 24)] and halted.report.steps == 3
    expected = alone.run(order(max_steps=3), base, Cursor()).update
    np.testing.assert_allclose(halted.update, expected, rtol=0, atol=TOLERANCE)
    assert group.run(order(max_steps=10**6, budget_s=0.0), base).report.steps == 1


def test_a_part_that_runs_out_of_memory_does_its_rows_in_pieces(tmp_path: Path) -> None:
    group = Parts(tmp_path, [TwoClasses(), Cramped(fits=3)], LocalOptions(device="cpu"))
    alone = trainer()
    base = alone.initial_model()
    found = group.run(order(batch_size=12), base)
    np.testing.assert_allclose(found.update, alone.run(order(batch_size=12), base, Cursor()).update, rtol=0, atol=1e-6)
    assert found.report.batch_cap == 2 * 3, "of a whole batch, of which each has half at most"


def test_running_means_are_those_of_all_rows(tmp_path: Path) -> None:
    options = LocalOptions(device="cpu")
    alone, group = trainer(Normed(), 0, options), parts(tmp_path, options, Normed)
    base = alone.initial_model()
    found = group.run(order(batch_size=10, max_steps=1), base).update
    expected = alone.run(order(batch_size=10, max_steps=1), base, Cursor()).update
    name = "0.running_mean"
    np.testing.assert_allclose(
        alone.layout.split(found)[name], alone.layout.split(expected)[name], rtol=0, atol=TOLERANCE
    )


def test_what_no_batch_changes_stays_to_the_last_bit(tmp_path: Path) -> None:
    group = parts(tmp_path, LocalOptions(device="cpu"), Normed, count=3)
    group.run(order(batch_size=7, max_steps=1), group.trainers[0].initial_model())
    for each in group.trainers:
        assert torch.equal(each._model.get_buffer("mask"), torch.tensor([-torch.inf, 0.1]))


def test_parts_that_stay_at_the_silo_are_those_of_one_process(tmp_path: Path) -> None:
    options, run = LocalOptions(device="cpu"), PartPatterns(private=("2.*",))
    group = parts(tmp_path, options, run=run)
    alone = Trainer(TwoClasses(), slot(), options, run)
    base, first, second = alone.initial_model(), None, None
    for _ in range(2):
        first = group.run(order(), base, None if first is None else first.cursor)
        second = alone.run(order(), base, Cursor() if second is None else second.cursor)
    assert first is not None and second is not None and first.cursor.private
    np.testing.assert_allclose(first.update, second.update, rtol=0, atol=TOLERANCE)


def test_a_reader_ahead_gets_the_rows_of_its_share() -> None:
    sampler, cursor = Sampler(40, 1, "a"), Cursor()
    rows, _ = sampler.take(cursor, 16)
    walk = sampler.walk(cursor, 8, 2, slice(3, 8))
    found = [next(walk).rows for _ in range(6)]
    assert [len(each) for each in found] == [2, 2, 1] * 2
    assert [*chain.from_iterable(found)] == [*rows[3:8], *rows[11:16]]


def test_a_model_travels_in_spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedsync.train.processes.rank._SPAN", 4)
    group = parts(tmp_path, LocalOptions(device="cpu"))
    model = np.arange(10, dtype=np.float32)
    model.setflags(write=False)
    received: list[Vector] = []

    def part(number: int) -> None:
        rank = group.trainers[number].rank
        assert rank is not None
        received.append(rank.spread(None if number else model, 10))

    group._each(part)
    assert all(np.array_equal(each, model) for each in received) and len(received) == 2


def test_metrics_are_those_of_all_rows(tmp_path: Path) -> None:
    options = LocalOptions(device="cpu", measured=Wanted(("f1", "auroc"), 2))
    alone, group = trainer(None, 0, options), parts(tmp_path, options, count=3)
    base = alone.initial_model()
    found = group.run(order(evaluate=True), base).report.evaluation
    expected = alone.run(order(evaluate=True), base, Cursor()).report.evaluation
    assert found is not None and expected is not None
    assert found.sums == expected.sums and set(found.sums) == {"confusion/2", "scores/256"}
