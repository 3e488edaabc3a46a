"""Batches of a silo's data on the device: the choice of samples, and the part of a batch that fits in memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, tee
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, default_collate

from fedsync.client.lasting import Collate, LastingLoader, Piece, fetch
from fedsync.common.rng import Stream, derive_seed, generator
from fedsync.core.orders import Cursor
from fedsync.tasks.task_protocol import Batch
from fedsync.train.machine.device import is_out_of_memory

T = TypeVar("T")


class Sampler:
    """Sampler that walks over one seeded permutation of the samples after another; each silo has its own.

    Stateless except for a cache: the cursor determines the samples. A failed order can therefore be repeated, and
    samples that an early stop left out come first in the next order (A-BSP, section 3.3.1: unprocessed data first).
    """

    def __init__(self, examples: int, seed: int, silo: str) -> None:
        self._examples = examples
        self._seed = seed
        self._silo = silo
        self._epoch = -1
        self._order: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def take(self, cursor: Cursor, count: int) -> tuple[NDArray[np.int64], Cursor]:
        """Return the next ``count`` >= 1 sample numbers, int64 [count], read-only, and the cursor after them. A batch
        may span epochs. A cursor past the end, from before the silo lost data, starts the next epoch.
        """
        if count < 1:
            raise ValueError(f"a batch needs at least one sample, not {count}")
        epoch, position = cursor.epoch, cursor.position
        parts, left = [], count
        while left:
            part = self._permutation(epoch)[position : position + left]
            parts.append(part)
            left -= len(part)
            epoch, position = epoch + 1, 0
        return (parts[0] if len(parts) == 1 else np.concatenate(parts)), self.after(cursor, count)

    def after(self, cursor: Cursor, count: int) -> Cursor:
        if not count:
            return cursor
        start = cursor if cursor.position < self._examples else Cursor(cursor.epoch + 1)
        epochs, position = divmod(start.position + count, self._examples)
        return Cursor(start.epoch + epochs, position)

    def walk(self, cursor: Cursor, batch_size: int, piece: int) -> Iterator[Piece]:
        """Yield batches without end, in pieces of at most ``piece``, each with its own seed, for reading ahead. Use a
        separate sampler, because a sampler caches only one permutation.
        """
        seed = derive_seed(self._seed, Stream.FETCHING, self._silo)
        while True:
            at = seed + cursor.epoch * self._examples + cursor.position
            rows, cursor = self.take(cursor, batch_size)
            for start in range(0, batch_size, piece):
                yield Piece((at + start) % 2**63, rows[start : start + piece].tolist())

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        if epoch != self._epoch:
            self._order = generator(self._seed, Stream.SAMPLER, self._silo, epoch).permutation(self._examples)
            self._epoch = epoch
        return self._order


class Batches(ABC):
    """A data set that is cut into batches on a device."""

    @abstractmethod
    def __len__(self) -> int: ...

    def begin(self, walk: Iterator[Piece], count: int) -> None:  # noqa: B027  # most read nothing ahead
        """Announce the next ``count`` pieces of ``walk``; pieces after these may be requested as well."""

    def place(self, rows: NDArray[np.int64]) -> Tensor:
        """Convert sample numbers, int64 [n], to the tensor that `take` expects."""
        return torch.from_numpy(rows)

    @abstractmethod
    def take(self, rows: Tensor) -> Batch:
        """Return the batch of the samples ``rows``, int64 [n] from `place`, in this order, on the device."""


class TensorBatches(Batches):
    """Batches of tensors that live on the device, by one `index_select` per tensor."""

    def __init__(self, dataset: TensorDataset, device: torch.device) -> None:
        self._tensors = [tensor.to(device) for tensor in dataset.tensors]
        self._device = device

    def __len__(self) -> int:
        return len(self._tensors[0])

    def place(self, rows: NDArray[np.int64]) -> Tensor:
        return super().place(rows).to(self._device)

    def take(self, rows: Tensor) -> Batch:
        return [tensor.index_select(0, rows) for tensor in self._tensors]


class CollatedBatches(Batches):
    """Batches of a map-style data set that this process reads between two steps, and that move to the device one at a
    time, pinned ones while the device computes.
    """

    def __init__(self, dataset: Dataset[Any], device: torch.device, collate: Collate) -> None:
        self._dataset, self._device, self._collate = dataset, device, collate

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]  # torch declares no __len__ for map-style data

    def take(self, rows: Tensor) -> Batch:
        return moved(self._read(rows), self._device)

    def _read(self, rows: Tensor) -> Batch:
        return fetch(self._dataset, rows.tolist(), self._collate)


class WorkersBatches(CollatedBatches):
    """Batches that worker processes, at least one, read ahead, for a GPU into pinned memory. When memory limits split
    an announced batch into smaller pieces, this process reads the pieces itself.
    """

    def __init__(self, dataset: Dataset[Any], device: torch.device, collate: Collate, workers: int) -> None:
        super().__init__(dataset, device, collate)
        options = {"num_workers": workers, "collate_fn": collate, "pin_memory": device.type == "cuda"}
        self._loader: LastingLoader[Batch] = LastingLoader(dataset, options)
        self._batches: Iterator[Batch] = iter(())
        self._pieces: Iterator[Piece] = iter(())
        self._next: Piece | None = None

    def begin(self, walk: Iterator[Piece], count: int) -> None:
        ahead, here = tee(walk)
        self._batches = self._loader.order(ahead, count)
        self._pieces = islice(here, count)
        self._next = next(self._pieces, None)

    def _read(self, rows: Tensor) -> Batch:
        if self._next is None or rows.tolist() != self._next.rows:
            return super()._read(rows)
        self._next = next(self._pieces, None)
        return next(self._batches)


def batches_of(
    dataset: Dataset[Any], device: torch.device, collate: Collate = default_collate, workers: int = 0
) -> Batches:
    """Choose the fastest way to cut ``dataset`` into batches. Only a plain `TensorDataset` with the default ``collate``
    is kept on the device: a subclass may index differently.
    """
    if type(dataset) is TensorDataset and collate is default_collate:
        return TensorBatches(dataset, device)
    if workers:
        return WorkersBatches(dataset, device, collate, workers)
    return CollatedBatches(dataset, device, collate)


def hand_over_by_value() -> None:
    """Make loader workers send tensors as bytes; PyTorch's default needs Unix sockets or shared files."""
    ForkingPickler.register(torch.Tensor, _bytes_of)


def _bytes_of(tensor: Tensor) -> tuple[Any, ...]:
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return _tensor_of, (raw, tensor.dtype, tuple(tensor.shape))


def _tensor_of(raw: NDArray[np.uint8], kind: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(raw).view(kind).reshape(shape)


def moved(value: Any, device: torch.device) -> Any:
    """Return a batch on the device: tensors, objects with a method ``to``, and the containers of `default_collate`."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if callable(getattr(type(value), "to", None)):
        return value if (placed := value.to(device)) is None else placed  # some change in place
    if isinstance(value, Mapping):
        return {key: moved(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(moved(item, device) for item in value))
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [moved(item, device) for item in value]
    return value


_PRECISION = 16


def largest_fit(fits: Callable[[int], bool], most: int, go_on: Callable[[], bool]) -> int | None:
    """Find the largest size up to ``most`` that fits, to within a sixteenth: doubling from 1, then bisection.

    Returns a size that was tried and fits, 0 if size 1 does not fit, or None if no size has failed. ``go_on`` is called
    before each size but the first; False ends the search.
    """
    fitting, failing = 0, 1
    while fits(failing):
        if failing == most or not go_on():
            return None
        fitting, failing = failing, min(2 * failing, most)
    while failing - fitting > max(1, fitting // _PRECISION) and go_on():
        middle = (fitting + failing) // 2
        if fits(middle):
            fitting = middle
        else:
            failing = middle
    return fitting


class BatchCap:
    """Limit on the number of samples that fit the memory at once, learned from failures.

    `largest` is the largest piece worth trying [samples], None until memory runs out. It halves at each failure and
    never grows, because an order that fails now and then costs more than constantly small pieces.
    """

    def __init__(self) -> None:
        self.largest: int | None = None

    def search(
        self, work: Callable[[int], object], reset: Callable[[], None], most: int, go_on: Callable[[], bool]
    ) -> int | None:
        """Find `largest` by whole steps over a number of samples; see `largest_fit`. ``reset`` undoes the effects of
        ``work`` and frees memory. Raises all errors of ``work``, except out of memory for more than one sample.
        """

        def fits(size: int) -> bool:
            done = False
            try:
                work(size)
                done = True
            except (RuntimeError, MemoryError) as error:
                if size == 1 or not is_out_of_memory(error):
                    raise
            except ValueError:
                # Batch normalisation refuses a single sample; this says nothing about memory.
                if size > 1:
                    raise
                done = True
            # Not inside the handler: see `work_off`.
            reset()
            return done

        found = largest_fit(fits, most, go_on)
        if found is not None:
            self.largest = found if self.largest is None else min(self.largest, found)
        return found

    def piece(self, count: int) -> int:
        return count if self.largest is None else min(count, self.largest)

    def work_off(self, rows: Tensor, work: Callable[[Tensor, float], T], reset: Callable[[], None]) -> list[T]:
        """Return the results of ``work`` on pieces of ``rows``, int64 [n >= 1], that fit.

        ``work`` gets a piece and its share of ``rows``. If memory runs out, ``reset`` undoes its effects, and all rows
        are repeated in smaller pieces. All other errors are raised.
        """
        count = len(rows)
        while True:
            size = self.piece(count)
            try:
                if size == count:
                    return [work(rows, 1.0)]
                pieces = torch.tensor_split(rows, -(-count // size))  # even: batch norm refuses a piece of one row
                return [work(piece, len(piece) / count) for piece in pieces]
            except (RuntimeError, MemoryError) as error:
                if size == 1 or not is_out_of_memory(error):
                    raise
            # Outside the handler: inside, the error's traceback still holds the tensors that were too large.
            reset()
            self.largest = size // 2
