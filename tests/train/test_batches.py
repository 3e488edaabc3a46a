from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset

from fedsync.train.batches import Batches, CollatedBatches, TensorBatches, batches_of

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
