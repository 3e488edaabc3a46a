"""Running out of memory is not the end: a batch can be worked off in pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from fedsync.train.device import is_out_of_memory

T = TypeVar("T")


class BatchCap:
    """Learns how many samples fit the memory at once.

    `largest` is the largest piece that is known to be worth trying [samples], None while memory never
    ran out. It halves at each failure and never grows back: an order that fails now and then costs more
    than one that always takes small pieces.
    """

    def __init__(self) -> None:
        self.largest: int | None = None

    def work_off(self, rows: Tensor, work: Callable[[Tensor, float], T], reset: Callable[[], None]) -> list[T]:
        """Results of ``work`` on consecutive pieces of ``rows`` that fit the memory.

        Args:
            rows: sample numbers, int64 [n], at least one.
            work: done on each piece, with its share of ``rows``; all over again, with smaller pieces, if
                memory runs out.
            reset: undoes what ``work`` did so far, and frees memory.

        Raises:
            RuntimeError: whatever ``work`` raises, unless memory ran out and a smaller piece is possible.
        """
        count = len(rows)
        while True:
            size = count if self.largest is None else min(count, self.largest)
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
