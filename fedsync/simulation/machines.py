"""Timing models of machines: the duration of an order step by step, without a clock and without training."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fedsync.core.orders import Window, WorkOrder
from fedsync.core.report_checks import MAX_WINDOWS

Floats = NDArray[np.float64]


class Course(NamedTuple):
    """End times of an order's local steps: ``begin_s + after_s[k]`` seconds since the run began.

    The sum is not stored: orders of the same size share the array, and usually only its last element is needed.
    """

    begin_s: float
    after_s: Floats

    @property
    def last_s(self) -> float:
        return self.begin_s + float(self.after_s[-1])

    @property
    def ends(self) -> Floats:
        """End of each step, float64 [steps]."""
        return self.begin_s + self.after_s

    def cut(self, steps: int) -> Course:
        return self if steps == len(self.after_s) else Course(self.begin_s, self.after_s[:steps])


class TimedMachine(Protocol):
    """Timing of one silo, which works on one order at a time."""

    @property
    def overhead_s(self) -> float:
        """Seconds of an order besides its steps and its transfer."""

    @property
    def latency_s(self) -> float:
        """Seconds that an empty message takes one way."""

    def transfer_s(self, nbytes: int) -> float:
        """Return the seconds that a message of this size takes one way."""

    def course(self, order: WorkOrder, start_s: float) -> Course:
        """Return the end times of the steps of an order that begins at ``start_s``, seconds since the run began."""


def speed_windows(batch_size: int, start_s: float, ends: Floats) -> tuple[Window, ...]:
    """Return the speed windows of a report for steps that end at ``ends``; load of other programs is not simulated."""
    steps = len(ends)
    marks = np.unique(np.linspace(0, steps, min(steps, MAX_WINDOWS) + 1).astype(np.int64))
    times = np.concatenate([[start_s], ends])[marks]
    speeds = batch_size * np.diff(marks) / np.diff(times)
    return tuple(Window(float(speed)) for speed in speeds)
