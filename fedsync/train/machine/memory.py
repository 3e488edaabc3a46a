"""Running out of memory is not the end: a batch can be worked off in pieces, and the largest piece be found."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from fedsync.train.machine.device import is_out_of_memory

T = TypeVar("T")

_PRECISION = 16


def largest_fit(fits: Callable[[int], bool], most: int, go_on: Callable[[], bool]) -> int | None:
    """The largest size that fits, to a sixteenth of itself; None if everything up to ``most`` does.

    Sizes double from 1 until one does not fit; bisection follows.

    Args:
        fits: tries a size; once one does not fit, no larger one does.
        most: largest size to try, at least 1.
        go_on: asked before each size but the first; False ends the search with what is known, which is None
            if nothing has failed yet.

    Returns:
        A size that was tried and fits, 0 if 1 does not, or None.
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
    """Learns how many samples fit the memory at once.

    `largest` is the largest piece that is known to be worth trying [samples], None while memory never
    ran out. It halves at each failure and never grows back: an order that fails now and then costs more
    than one that always takes small pieces.
    """

    def __init__(self) -> None:
        self.largest: int | None = None

    def search(
        self, work: Callable[[int], object], reset: Callable[[], None], most: int, go_on: Callable[[], bool]
    ) -> int | None:
        """Find `largest` by trying; see `largest_fit`.

        Args:
            work: does a whole step over so many samples.
            reset: undoes what ``work`` did, and frees memory.
            most: largest number of samples to try.
            go_on: False ends the search.

        Raises:
            RuntimeError: whatever ``work`` raises, unless memory ran out; that too over one single sample.
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
                # Batch normalisation refuses a single sample, which says nothing of memory.
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
        """Samples to work off at once of so many, which are to make that many pieces at least."""
        size = -(-count // pieces)
        return size if self.largest is None else min(size, self.largest)

    def work_off(
        self, rows: Tensor, work: Callable[[Tensor, float], T], reset: Callable[[], None], pieces: int = 1
    ) -> list[T]:
        """Results of ``work`` on consecutive pieces of ``rows`` that fit the memory.

        Args:
            rows: sample numbers, int64 [n], at least one.
            work: done on each piece, with its share of ``rows``; all over again, with smaller pieces, if
                memory runs out.
            reset: undoes what ``work`` did so far, and frees memory.
            pieces: how many they are where the memory takes them all, or fewer of few rows.

        Raises:
            RuntimeError: whatever ``work`` raises, unless memory ran out and a smaller piece is possible.
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
            # Not inside the handler, where the error's traceback still holds the tensors that were too large.
            reset()
            self.largest = size // 2
