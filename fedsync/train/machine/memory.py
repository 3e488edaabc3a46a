"""Recovery from out-of-memory errors: a batch is worked off in smaller pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from fedsync.train.machine.device import is_out_of_memory

T = TypeVar("T")

_PRECISION = 16


def largest_fit(fits: Callable[[int], bool], most: int, go_on: Callable[[], bool]) -> int | None:
    """Find the largest size up to ``most`` that fits, to within a sixteenth: doubling from 1, then bisection.

    ``go_on`` is called before each size but the first; False ends the search. Returns a size that was tried and fits, 0
    if size 1 does not fit, or None if no size has failed.
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
        """Find `largest` by whole steps over a number of samples; see `largest_fit`.

        ``reset`` undoes the effects of ``work`` and frees memory. Raises any error of ``work``, except out-of-memory
        errors for more than one sample.
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

    def piece(self, count: int, pieces: int = 1) -> int:
        """Number of samples to work off at once, so that ``count`` samples make at least ``pieces`` pieces."""
        size = -(-count // pieces)
        return size if self.largest is None else min(size, self.largest)

    def work_off(
        self, rows: Tensor, work: Callable[[Tensor, float], T], reset: Callable[[], None], pieces: int = 1
    ) -> list[T]:
        """Return the results of ``work`` on at least ``pieces`` pieces of ``rows``, int64 [n >= 1], that fit.

        ``work`` gets a piece and its share of ``rows``. If memory runs out, ``reset`` undoes its effects, and it is
        called again for all rows, in smaller pieces, as long as there are any. All other errors are raised.
        """
        count = len(rows)
        while True:
            size = self.piece(count, pieces)
            try:
                if size == count:
                    return [work(rows, 1.0)]
                return [work(piece, len(piece) / count) for piece in torch.split(rows, size)]
            except (RuntimeError, MemoryError) as error:
                if size == 1 or not is_out_of_memory(error):
                    raise
            # Outside the handler: inside, the error's traceback still holds the tensors that were too large.
            reset()
            self.largest = size // 2
