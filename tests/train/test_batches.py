from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset, default_collate

from fedsync.core.orders import Cursor
from fedsync.tasks.task_protocol import SiloData, SiloSlot
from fedsync.train import batches as cutting
from fedsync.train import loop
from fedsync.train.batches import (
    Batches,
    CollatedBatches,
    PrefetchedBatches,
    SampleReader,
    TensorBatches,
    batches_of,
    map_tensors,
)
from fedsync.train.options import LocalOptions
from tests.train.make import TwoClasses, order, trainer

CPU = torch.device("cpu")
INPUTS, LABELS = torch.arange(12.0).reshape(6, 2), torch.arange(6)


class Listed(Dataset[Any]):
    """Samples in a list."""

    def __init__(self, samples: list[Any]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return self._samples[index]


class Point(NamedTuple):
    place: torch.Tensor
    label: int


class Shifted(TensorDataset):
    """Indexes in its own way, so may not be cut behind its back."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        inputs, label = super().__getitem__(index)
        return inputs + 100, label


def take(batches: Batches, rows: np.ndarray) -> Any:
    return batches.take(batches.place(rows))


def test_both_ways_give_the_same_batch() -> None:
    rows = np.array([4, 0, 3])
    tensors = batches_of(TensorDataset(INPUTS, LABELS), CPU)
    listed = batches_of(Listed(list(zip(INPUTS, LABELS, strict=True))), CPU)
    assert isinstance(tensors, TensorBatches)
    assert isinstance(listed, CollatedBatches)
    assert len(tensors) == len(listed) == 6
    for left, right in zip(take(tensors, rows), take(listed, rows), strict=True):
        assert torch.equal(left, right)
    assert torch.equal(take(tensors, rows)[1], torch.tensor([4, 0, 3]))


def test_a_subclass_keeps_its_own_indexing() -> None:
    inputs, _ = take(batches_of(Shifted(INPUTS, LABELS), CPU), np.array([1]))
    assert torch.equal(inputs, INPUTS[1:2] + 100)


def test_nested_samples_keep_their_shape() -> None:
    samples = [{"point": Point(torch.ones(2) * i, i), "name": f"p{i}"} for i in range(3)]
    batch = take(batches_of(Listed(samples), CPU), np.array([2, 1]))
    assert isinstance(batch["point"], Point)
    assert torch.equal(batch["point"].label, torch.tensor([2, 1]))
    assert batch["name"] == ["p2", "p1"]


class Road:
    """A lane to a device that is this processor; keeps what happened, in order."""

    def __init__(self) -> None:
        self.log: list[tuple[str, list[float]]] = []

    def send(self, batch: Any) -> Any:
        self.log.append(("send", batch.tolist()))
        return map_tensors(batch, torch.Tensor.clone)

    def receive(self, batch: Any) -> None:
        self.log.append(("receive", batch.tolist()))


def test_a_batch_asked_for_ahead_travels_while_the_one_before_is_used() -> None:
    road = Road()
    batches = PrefetchedBatches(SampleReader(Listed([0.0, 1.0, 2.0, 3.0]), default_collate), CPU, road)
    first, second = torch.tensor([0, 1]), torch.tensor([2, 3])
    assert batches.take(first).tolist() == [0, 1]  # the first one of an order: nobody could know
    batches.ahead(second)
    road.log.append(("compute", []))
    assert batches.take(second).tolist() == [2, 3]
    assert road.log == [("send", [2, 3]), ("compute", []), ("receive", [2, 3])]


def test_other_rows_than_those_asked_for_ahead_are_fetched_at_once() -> None:
    road = Road()
    batches = PrefetchedBatches(SampleReader(Listed([0.0, 1.0, 2.0, 3.0]), default_collate), CPU, road)
    rows = torch.tensor([2, 3])
    batches.ahead(rows)
    # As after running out of memory: the same numbers in pieces.
    assert [batches.take(piece).tolist() for piece in torch.split(rows, 1)] == [[2], [3]]
    assert batches.take(rows).tolist() == [2, 3]
    assert batches.take(rows).tolist() == [2, 3], "once more: it is not kept"
    assert [kind for kind, _ in road.log] == ["send", "receive"]


def test_data_that_do_not_live_on_a_gpu_are_fetched_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "CudaLane", lambda device: Road())
    assert isinstance(batches_of(Listed([0.0]), torch.device("cuda", 0)), PrefetchedBatches)
    assert not isinstance(batches_of(Listed([0.0]), CPU), PrefetchedBatches)


class Noisy(Listed):
    """Adds a random number to each sample, as augmentation does."""

    def __getitem__(self, index: int) -> Any:
        inputs, label = super().__getitem__(index)
        return inputs + 0.1 * torch.rand(()), label


class Augmented(TwoClasses):
    """The same points in a data set that must be read sample by sample."""

    def data(self, slot: SiloSlot) -> SiloData:
        data = super().data(slot)
        return SiloData(Noisy(list(zip(*data.train.tensors, strict=True))), data.test)  # type: ignore[attr-defined]


def test_an_order_with_batches_on_their_way_is_as_reproducible(monkeypatch: pytest.MonkeyPatch) -> None:
    class Straight(Road):
        def send(self, batch: Any) -> Any:
            return batch

        def receive(self, batch: Any) -> None:
            self.log.append(("receive", []))

    road = Straight()
    monkeypatch.setattr(
        loop,
        "batches_of",
        lambda dataset, device, *_: PrefetchedBatches(SampleReader(dataset, default_collate), device, road),
    )
    subject = trainer(Augmented())
    base = subject.initial_model()
    first = subject.run(order(max_steps=5), base, Cursor())
    assert len(road.log) == 4, "all but the first one"
    # A budget of nothing ends the order after a step, with a batch on its way that nobody takes.
    cut = subject.run(order(max_steps=5, budget_s=0.0), base, Cursor())
    again = subject.run(order(max_steps=5), base, Cursor())
    assert (cut.report.steps, cut.cursor) == (1, Cursor(0, 8))
    np.testing.assert_array_equal(again.update, first.update)


class Batched(TwoClasses):
    """Dict samples, which are read a batch at a time, and a batch of its own making."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def data(self, slot: SiloSlot) -> SiloData:
        asked, data = self.asked, super().data(slot)

        class Many(Listed):
            def __getitems__(self, rows: list[int]) -> list[Any]:
                asked.append(len(rows))
                return [self._samples[row] for row in rows]

        train, test = (
            [{"x": x, "y": y} for x, y in zip(*each.tensors, strict=True)]  # type: ignore[attr-defined]
            for each in (data.train, data.test)
        )
        return SiloData(Many(train), Many(test))

    def collate(self, samples: list[Any]) -> Any:
        return [torch.stack([sample[key] for sample in samples]) for key in ("x", "y")]


def test_workers_and_a_collate_of_ones_own_change_nothing() -> None:
    plain = trainer(options=LocalOptions(device="cpu"))
    base = plain.initial_model()
    task = Batched()
    for workers in (0, 2):
        subject = trainer(task, options=LocalOptions(device="cpu", workers=workers))
        cursors = Cursor(), Cursor()
        for size, evaluate in ((8, True), (8, False), (5, True)):
            what = order(batch_size=size, max_steps=4, evaluate=evaluate)
            ours, theirs = (
                each.run(what, base, cursor) for each, cursor in zip((plain, subject), cursors, strict=True)
            )
            np.testing.assert_array_equal(theirs.update, ours.update)
            assert (theirs.report.evaluation is None) == (not evaluate)
            assert theirs.report.evaluation == ours.report.evaluation
            cursors = ours.cursor, theirs.cursor
    assert task.asked[:3] == [1, 10, 8], "a try, the test samples, the first piece; in this process"


def test_memory_that_runs_out_under_workers_is_no_end() -> None:
    class Scarce(Batched):
        fits = 3

        def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
            if len(batch[0]) > self.fits:
                raise torch.OutOfMemoryError("out of memory")
            return super().loss(model, batch)

    base = trainer().initial_model()
    subject = trainer(Scarce(), options=LocalOptions(device="cpu", workers=1))
    first = subject.run(order(batch_size=8, max_steps=4), base, Cursor())
    assert first.report.batch_cap == 2
    np.testing.assert_array_equal(subject.run(order(batch_size=8, max_steps=4), base, Cursor()).update, first.update)
