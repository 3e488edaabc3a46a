"""From sample numbers to a batch on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, tee
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, default_collate

from fedsync.client.lasting import Collate, LastingLoader, Piece, fetch
from fedsync.tasks.task_protocol import Batch


class Batches(Protocol):
    """One data set, cut to batches on a device."""

    def __len__(self) -> int: ...

    def begin(self, walk: Iterator[Piece], count: int) -> None:
        """Learn what will be taken: the next ``count`` pieces of ``walk``, and perhaps the ones after."""

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

    def begin(self, walk: Iterator[Piece], count: int) -> None:
        """See `Batches.begin`: nothing to fetch, the samples are there."""

    def place(self, rows: NDArray[np.int64]) -> Tensor:
        """See `Batches.place`: on the device, so that a whole order's numbers cross in one piece."""
        return torch.from_numpy(rows).to(self._device)

    def take(self, rows: Tensor) -> Batch:
        return [tensor.index_select(0, rows) for tensor in self._tensors]

    def ahead(self, rows: Tensor) -> None:
        """See `Batches.ahead`: nothing to fetch, the samples are there."""


class SampleReader:
    """Reads samples of a map-style data set and collates them, between two steps.

    Args:
        dataset: map-style.
        collate: makes a batch of samples.
    """

    def __init__(self, dataset: Dataset[Any], collate: Collate) -> None:
        self._dataset = dataset
        self._collate = collate

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]  # torch declares no __len__ for map-style data

    def begin(self, walk: Iterator[Piece], count: int) -> None:
        """See `Batches.begin`: the process that would fetch is the one that trains."""

    def read(self, rows: Tensor) -> Batch:
        """The batch of the samples ``rows``, int64 [n], where the data set leaves it."""
        return fetch(self._dataset, rows.tolist(), self._collate)


class WorkersReader(SampleReader):
    """The same by worker processes, which read ahead; a batch that comes in smaller pieces after all is read here.

    Args:
        dataset: map-style.
        collate: makes a batch of samples.
        workers: processes, at least 1.
        pinned: batches are to lie in pinned memory.
    """

    def __init__(self, dataset: Dataset[Any], collate: Collate, workers: int, *, pinned: bool) -> None:
        super().__init__(dataset, collate)
        options = {"num_workers": workers, "collate_fn": collate, "pin_memory": pinned}
        self._loader: LastingLoader[Batch] = LastingLoader(dataset, options)
        self._batches: Iterator[Batch] = iter(())
        self._pieces: Iterator[Piece] = iter(())
        self._next: Piece | None = None

    def begin(self, walk: Iterator[Piece], count: int) -> None:
        """See `Batches.begin`."""
        ahead, here = tee(walk)
        self._batches = self._loader.order(ahead, count)
        self._pieces = islice(here, count)
        self._next = next(self._pieces, None)

    def read(self, rows: Tensor) -> Batch:
        """See `SampleReader.read`."""
        if self._next is None or rows.tolist() != self._next.rows:
            return super().read(rows)
        self._next = next(self._pieces, None)
        return next(self._batches)


class CollatedBatches:
    """What a reader reads, moved to the device batch by batch."""

    def __init__(self, reader: SampleReader, device: torch.device) -> None:
        self._reader = reader
        self._device = device

    def __len__(self) -> int:
        return len(self._reader)

    def begin(self, walk: Iterator[Piece], count: int) -> None:
        """See `Batches.begin`."""
        self._reader.begin(walk, count)

    def place(self, rows: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(rows)

    def take(self, rows: Tensor) -> Batch:
        return map_tensors(self._reader.read(rows), lambda tensor: tensor.to(self._device))

    def ahead(self, rows: Tensor) -> None:
        """See `Batches.ahead`: the processor that would copy is the one that trains."""


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

    Without workers in the same thread, so that a data set which draws random numbers draws the same every time.
    """

    def __init__(self, reader: SampleReader, device: torch.device, lane: Lane) -> None:
        super().__init__(reader, device)
        self._lane = lane
        self._rows: Tensor | None = None
        self._batch: Batch = None

    def ahead(self, rows: Tensor) -> None:
        self._rows, self._batch = rows, self._lane.send(self._reader.read(rows))

    def take(self, rows: Tensor) -> Batch:
        """See `Batches.take`. A batch that was not asked for ahead, as a piece of one, is fetched at once."""
        if rows is not self._rows:
            return super().take(rows)
        batch, self._rows, self._batch = self._batch, None, None
        self._lane.receive(batch)
        return batch


def batches_of(
    dataset: Dataset[Any], device: torch.device, collate: Collate = default_collate, workers: int = 0
) -> Batches:
    """The quickest way to cut ``dataset``.

    No short cut for a subclass of `TensorDataset`, which may index in its own way, nor for a ``collate`` of one's own.
    """
    on_gpu = device.type == "cuda"
    if type(dataset) is TensorDataset and collate is default_collate:
        return TensorBatches(dataset, device)
    reader = WorkersReader(dataset, collate, workers, pinned=on_gpu) if workers else SampleReader(dataset, collate)
    return PrefetchedBatches(reader, device, CudaLane(device)) if on_gpu else CollatedBatches(reader, device)


def hand_over_by_value() -> None:
    """Have processes of a loader send tensors as bytes: the way of PyTorch's own needs Unix sockets or shared files."""
    ForkingPickler.register(torch.Tensor, _bytes_of)


def _bytes_of(tensor: Tensor) -> tuple[Any, ...]:
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return _tensor_of, (raw, tensor.dtype, tuple(tensor.shape))


def _tensor_of(raw: NDArray[np.uint8], kind: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(raw).view(kind).reshape(shape)


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
