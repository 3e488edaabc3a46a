"""Load of this machine for a silo's reports: processors that are left to the trainer, and memory in use."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import psutil

_TICK_S = 0.01
"""Resolution of Linux's processor time [s]."""


def machine_busy_s() -> float:
    """Processor seconds of the machine since boot, including other guests of a hypervisor."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq + times.steal)


def machine_memory_share() -> float:
    return float(psutil.virtual_memory().percent / 100)


def own_memory_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


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
