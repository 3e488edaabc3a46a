"""Sampler of a silo's data: no sample repeats before all were used, across batches, orders and restarts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fedsync.client.lasting import Piece
from fedsync.common.rng import Stream, derive_seed, generator
from fedsync.core.orders import Cursor

_ALL = slice(None)


class Sampler:
    """Sampler that walks over one seeded permutation of the samples after another; each silo has its own.

    Stateless except for a cache: cursor and count determine the samples. A failed order can therefore be repeated,
    and the samples that an early stop left out come first in the next order.

    Source: A-BSP, section 3.3.1 (unprocessed data first).
    """

    def __init__(self, examples: int, seed: int, silo: str) -> None:
        self._examples = examples
        self._seed = seed
        self._silo = silo
        self._epoch = -1
        self._order: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def take(self, cursor: Cursor, count: int) -> tuple[NDArray[np.int64], Cursor]:
        """Return the next ``count`` sample numbers, int64 [count], and the cursor after them.

        The numbers are a view of the permutation: do not write to them. A batch may span epochs. A cursor past the
        end, from before the silo lost data, starts the next epoch. Raises ValueError if ``count`` is below 1.
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
        """Return the cursor after ``count`` more samples, without drawing them."""
        if not count:
            return cursor
        start = cursor if cursor.position < self._examples else Cursor(cursor.epoch + 1)
        epochs, position = divmod(start.position + count, self._examples)
        return Cursor(start.epoch + epochs, position)

    def walk(self, cursor: Cursor, batch_size: int, piece: int, own: slice = _ALL) -> Iterator[Piece]:
        """Yield batches without end: of each the rows ``own``, in pieces of at most ``piece``, each with its own seed.

        For reading ahead. Use a separate sampler, because a sampler caches only one permutation.
        """
        seed = derive_seed(self._seed, Stream.FETCHING, self._silo)
        while True:
            at = seed + cursor.epoch * self._examples + cursor.position
            rows, cursor = self.take(cursor, batch_size)
            first, last, _ = own.indices(batch_size)
            for start in range(first, last, piece):
                yield Piece((at + start) % 2**63, rows[start : min(start + piece, last)].tolist())

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        if epoch != self._epoch:
            self._order = generator(self._seed, Stream.SAMPLER, self._silo, epoch).permutation(self._examples)
            self._epoch = epoch
        return self._order
