"""Load of this machine: processors left to the trainer and memory in use, for reports, and a check that a model fits.

A trial allocation is no test of memory: the system promises more than it has, and kills the process that uses it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.overrides import TorchFunctionMode

from fedsync.common.errors import ConfigError, HugeModel

_TICK_S = 0.01
"""Resolution of Linux's processor time [s]."""


def machine_busy_s() -> float:
    """Processor seconds of the machine since boot, including other guests of a hypervisor."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq + times.steal)


def machine_memory_share() -> float:
    return float(psutil.virtual_memory().percent / 100)


class Resources:
    """Reader of the machine's load for a silo's reports: means since the previous reading.

    The share of processors available to the trainer is 1 minus the share of time in which the machine's processors work
    for others; the trainer's own load counts as available. Processor time has a resolution of 10 ms: one reading over
    50 ms is coarse, the mean of several is not.
    """

    def __init__(
        self,
        busy_s: Callable[[], float] = machine_busy_s,
        own_s: Callable[[], float] = time.process_time,
        used: Callable[[], float] = machine_memory_share,
        processors: int | None = None,
    ) -> None:
        self._busy_s, self._own_s, self._used = busy_s, own_s, used
        self._processors = processors or os.cpu_count() or 1
        self._at_s, self._others_s = 0.0, 0.0
        # Ticks can make the load of others negative; the deficit is carried over to the next readings.
        self._owed_s = 0.0

    def begin(self, now_s: float) -> None:
        """Restart the measurement at ``now_s``, the reading of any clock [s]; call it first."""
        self._at_s, self._others_s, self._owed_s = now_s, self._busy_s() - self._own_s(), 0.0

    def read(self, now_s: float) -> tuple[float | None, float]:
        """Return processor share since the last reading, None if no time has passed, and memory in use, 0..1."""
        seconds, total_s = now_s - self._at_s, self._busy_s() - self._own_s()
        others_s = total_s - self._others_s + self._owed_s
        self._at_s, self._others_s = now_s, total_s
        if seconds <= 0:
            return None, self._used()
        self._owed_s = max(min(others_s, 0.0), -_TICK_S * self._processors)
        return min(max(1 - max(others_s, 0.0) / seconds / self._processors, 0.0), 1.0), self._used()


NOBODY_HAS_BYTES = 2**42
"""Memory beyond any machine: a larger model need not be tried elsewhere [bytes]."""

_REMEDY = "Choose narrower or fewer layers, for example by task.hidden"
_MAKERS = {torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn}
"""Functions with which modules allocate tensors; the size comes first, as one argument or as several."""


def machine_bytes(root: Path = Path("/")) -> int:
    """Memory that a process can have [bytes]: the machine's, or a limit of its control groups (version 2) if lower."""
    found, groups = psutil.virtual_memory().total, root / "sys/fs/cgroup"
    with suppress(OSError):
        inside = Path((root / "proc/self/cgroup").read_text().rpartition("0::")[2].strip().lstrip("/"))
        for group in (inside, *inside.parents):
            limit = groups / group / "memory.max"
            text = limit.read_text().strip() if limit.is_file() else ""
            found = min(found, int(text)) if text.isdecimal() else found
    return int(found)


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
