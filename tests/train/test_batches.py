from __future__ import annotations

from collections import UserDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from fedsync.core.orders import Cursor
from fedsync.tasks.task_protocol import SiloData, SiloSlot
from fedsync.train.batches import Batches, CollatedBatches, TensorBatches, batches_of
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


class Encoded(UserDict[str, torch.Tensor]):
    """A batch that moves itself and is read by attributes, as a tokenizer's is."""

    @staticmethod
    def of(samples: Any) -> Encoded:
        return Encoded(x=torch.tensor(samples))

    def __getattr__(self, name: str) -> torch.Tensor:
        return self.data[name]

    def to(self, device: torch.device) -> Encoded:
        return Encoded({name: tensor.to(device) for name, tensor in self.data.items()})


class InPlace:
    """A batch whose method moves it, and returns nothing."""

    def __init__(self, samples: Any) -> None:
        self.x = torch.tensor(samples)

    def to(self, device: torch.device) -> None:
        self.x = self.x.to(device)


@pytest.mark.parametrize(("collate", "kind"), [(Encoded.of, Encoded), (InPlace, InPlace)])
def test_a_batch_that_moves_itself_stays_what_it_is_and_is_not_lost(collate: Any, kind: type[Any]) -> None:
    read = batches_of([1.0, 2.0], torch.device("meta"), collate)  # type: ignore[arg-type]
    batch = read.take(read.place(np.arange(2)))
    assert isinstance(batch, kind) and batch.x.device.type == "meta"


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
