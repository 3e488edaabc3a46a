"""Limits of memory: a batch that does not fit is worked off in smaller pieces, and a model that does not is refused.

A trial allocation of a model is no test: the system promises more memory than it has, and kills the process that uses
it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, TypeVar

import psutil
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedsync.common.errors import ConfigError, HugeModel
from fedsync.train.machine.device import is_out_of_memory
from fedsync.train.machine.resources import find_limits

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


NOBODY_HAS_BYTES = 2**42
"""Memory beyond any machine: a larger model need not be tried elsewhere [bytes]."""

_REMEDY = "Choose narrower or fewer layers, for example by task.hidden"
_MAKERS = {torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn}
"""Functions with which modules allocate tensors; the size comes first, as one argument or as several."""


def machine_bytes() -> int:
    """Memory that a process can have [bytes]: the machine's, or a control group's limit if that is lower."""
    limits = [total for limit in find_limits()[1] if (total := limit.total()) is not None]
    return int(min([psutil.virtual_memory().total, *limits]))


class FittingModel(TorchFunctionMode):
    """Context in which modules are built only if they fit in ``most_bytes``, by default this machine's memory.

    Counts every tensor allocated on the CPU, including temporary tensors. Raises `ConfigError`, or `HugeModel` if they
    need more memory than any silo has; the tensor over the limit is not allocated.
    """

    def __init__(self, most_bytes: int | None = None) -> None:
        super().__init__()
        self._most_bytes = machine_bytes() if most_bytes is None else most_bytes
        self._bytes = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if func in _MAKERS and torch.device(given.get("device") or "cpu").type == "cpu":
            self._count(args, given)
        return func(*args, **given)

    def _count(self, args: Sequence[Any], given: Mapping[str, Any]) -> None:
        size = given.get("size", args[0] if args and isinstance(args[0], Sequence) else args)
        itemsize = (given.get("dtype") or torch.get_default_dtype()).itemsize
        self._bytes += itemsize * prod(size)
        if self._bytes > self._most_bytes:
            huge = self._bytes > NOBODY_HAS_BYTES
            problem = f"the model takes {_readable(self._bytes)} at least"
            if not huge:
                problem += f", and this machine has {_readable(self._most_bytes)}"
            raise (HugeModel if huge else ConfigError)("task, its model", problem, _REMEDY)


def _readable(nbytes: int) -> str:
    return f"{nbytes / 2**30:,.1f} GiB"
