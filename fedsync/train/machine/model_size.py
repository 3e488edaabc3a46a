"""A model that this machine has not the memory for is refused before any of it is asked for.

Asking is no test: the system promises more memory than there is, and ends a process that uses what it was promised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import psutil
import torch
from torch.overrides import TorchFunctionMode

from fedsync.common.errors import ConfigError, HugeModel
from fedsync.train.machine.cgroups import find_limits

NOBODY_HAS_BYTES = 2**42
"""Memory of no machine; what is larger need not be tried on another one [bytes]."""

_REMEDY = "Choose narrower or fewer layers, for example by task.hidden"
_MAKERS = {torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn}
"""What modules make their tensors with: the size comes first, in one argument or in several."""


def machine_bytes() -> int:
    """Memory that a process can have here at most [bytes]: the machine's, or less where a control group says so."""
    limits = [total for limit in find_limits().memory if (total := limit.total()) is not None]
    return int(min([psutil.virtual_memory().total, *limits]))


class FittingModel(TorchFunctionMode):
    """Within, modules are made that fit the memory. A context manager.

    Counts what is made for a processor, also what is thrown away again.

    Args:
        most_bytes: that they may take together; None for all that this machine has.

    Raises:
        HugeModel: they would take more than any silo has.
        ConfigError: they would take more; in either case what goes beyond is not made.
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
        """Count a tensor that is about to be made."""
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
