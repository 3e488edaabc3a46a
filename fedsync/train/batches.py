"""From sample numbers to a batch on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, default_collate

from fedsync.tasks.protocol import Batch


class Batches(Protocol):
    """One data set, cut to batches on a device."""

    def __len__(self) -> int: ...

    def place(self, rows: NDArray[np.int64]) -> Tensor:
        """Sample numbers, int64 [n], as `take` wants them."""

    def take(self, rows: Tensor) -> Batch:
        """The batch of the samples ``rows``, int64 [n] from `place`, in that order, on the device."""

    def ahead(self, rows: Tensor) -> None:
        """Begin to fetch the batch that `take` is asked for next, where that saves time."""


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
        return [tensor.index_select(0, rows) for tensor in self._tensors]

    def ahead(self, rows: Tensor) -> None:
        """See `Batches.ahead`: nothing to fetch, the samples are there."""


class CollatedBatches:
    """Any map-style data set, read sample by sample and moved to the device batch by batch."""

    def __init__(self, dataset: Dataset[Any], device: torch.device) -> None:
        self._dataset = dataset
        self._device = device

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]  # torch declares no __len__ for map-style data

    def place(self, rows: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(rows)

    def take(self, rows: Tensor) -> Batch:
        return map_tensors(self.collate(rows), lambda tensor: tensor.to(self._device))

    def ahead(self, rows: Tensor) -> None:
        """See `Batches.ahead`: the processor that would fetch is the one that trains."""

    def collate(self, rows: Tensor) -> Batch:
        """The batch of the samples ``rows``, where the data set leaves it."""
        return default_collate([self._dataset[row] for row in rows.tolist()])


class Lane(Protocol):
    """A way to the device on which a batch travels while the device works."""

    def send(self, batch: Batch) -> Batch:
        """Start a batch; returns it as it will be on the device."""

    def receive(self, batch: Batch) -> None:
        """Have the device wait for a batch that was started."""


class CudaLane:
    """A stream of its own beside the one that computes, fed from pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def send(self, batch: Batch) -> Batch:
        """See `Lane.send`. Pinned memory is not used again before the copy is done: torch sees to that."""
        pinned = map_tensors(batch, lambda tensor: tensor.pin_memory() if tensor.device.type == "cpu" else tensor)
        with torch.cuda.stream(self._stream):
            return map_tensors(pinned, lambda tensor: tensor.to(self._device, non_blocking=True))

    def receive(self, batch: Batch) -> None:
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._stream)

        def keep(tensor: Tensor) -> Tensor:
            # Else its memory could be given to another batch while the computation still reads it.
            tensor.record_stream(computing)
            return tensor

        map_tensors(batch, keep)


class PrefetchedBatches(CollatedBatches):
    """The same with one batch on its way while the device works on the one before.

    In the same thread, so that a data set which draws random numbers draws the same ones every time.
    """

    def __init__(self, dataset: Dataset[Any], device: torch.device, lane: Lane) -> None:
        super().__init__(dataset, device)
        self._lane = lane
        self._rows: Tensor | None = None
        self._batch: Batch = None

    def ahead(self, rows: Tensor) -> None:
        self._rows, self._batch = rows, self._lane.send(self.collate(rows))

    def take(self, rows: Tensor) -> Batch:
        """See `Batches.take`. A batch that was not asked for ahead, as a piece of one, is fetched at once."""
        if rows is not self._rows:
            return super().take(rows)
        batch, self._rows, self._batch = self._batch, None, None
        self._lane.receive(batch)
        return batch


def batches_of(dataset: Dataset[Any], device: torch.device) -> Batches:
    """The quickest way to cut ``dataset``. A subclass of `TensorDataset` may index in its own way: no short cut."""
    if type(dataset) is TensorDataset:
        return TensorBatches(dataset, device)
    if device.type == "cuda":
        return PrefetchedBatches(dataset, device, CudaLane(device))
    return CollatedBatches(dataset, device)


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with every tensor in it changed; the containers are those that `default_collate` makes."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [map_tensors(item, change) for item in value]
    return value
