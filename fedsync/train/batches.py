"""From sample numbers to a batch on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, default_collate

from fedsync.tasks.protocol import Batch


class Batches(Protocol):
    """One data set, cut to batches on a device."""

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def place(self, rows: NDArray[np.int64]) -> Tensor:
        """Sample numbers, int64 [n], as `take` wants them."""
        ...

    def take(self, rows: Tensor) -> Batch:
        """The batch of the samples ``rows``, int64 [n] from `place`, in that order, on the device."""
        ...


class TensorBatches:
    """Tensors that live on the device; a batch is one `index_select` for each."""

    def __init__(self, dataset: TensorDataset, device: torch.device) -> None:
        self._tensors = [tensor.to(device) for tensor in dataset.tensors]
        self._device = device

    def __len__(self) -> int:
        return len(self._tensors[0])

    def place(self, rows: NDArray[np.int64]) -> Tensor:
        """See `Batches.place`: on the device, so that a whole order's numbers cross in one piece."""
        return torch.from_numpy(rows).to(self._device)

    def take(self, rows: Tensor) -> Batch:
        """See `Batches.take`."""
        return [tensor.index_select(0, rows) for tensor in self._tensors]


class CollatedBatches:
    """Any map-style data set, read sample by sample and moved to the device batch by batch."""

    def __init__(self, dataset: Dataset[Any], device: torch.device) -> None:
        self._dataset = dataset
        self._device = device

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]  # torch declares no __len__ for map-style data

    def place(self, rows: NDArray[np.int64]) -> Tensor:
        """See `Batches.place`: on the CPU."""
        return torch.from_numpy(rows)

    def take(self, rows: Tensor) -> Batch:
        """See `Batches.take`."""
        return _move(default_collate([self._dataset[row] for row in rows.tolist()]), self._device)


def batches_of(dataset: Dataset[Any], device: torch.device) -> Batches:
    """The quickest way to cut ``dataset``. A subclass of `TensorDataset` may index in its own way: no short cut."""
    if type(dataset) is TensorDataset:
        return TensorBatches(dataset, device)
    return CollatedBatches(dataset, device)


def _move(value: Any, device: torch.device) -> Any:
    """``value`` with every tensor in it on the device; the containers are those that `default_collate` makes."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: _move(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_move(item, device) for item in value))
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_move(item, device) for item in value]
    return value
