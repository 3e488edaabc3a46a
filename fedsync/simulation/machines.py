"""Machines as values: how long an order takes, step by step, without a clock and without training."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fedsync.core.orders import Window, WorkOrder
from fedsync.core.report_checks import MAX_WINDOWS

Floats = NDArray[np.float64]


class Course(NamedTuple):
    """When the local steps of an order end: ``begin_s + after_s[k]`` seconds since the run began.

    Kept as a sum, for the array is the same in every order of the same size, and seldom is more asked of it than
    its last element.
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
    """How long one silo takes. Its orders come one after the other."""

    @property
    def overhead_s(self) -> float:
        """Seconds that an order costs besides its steps and its transfer."""

    @property
    def latency_s(self) -> float:
        """Seconds until a message without content is there."""

    def transfer_s(self, nbytes: int) -> float:
        """Seconds that a message of this size takes one way."""

    def course(self, order: WorkOrder, start_s: float) -> Course:
        """When each local step of an order ends that begins at ``start_s``, seconds since the run began."""


def speed_windows(batch_size: int, start_s: float, ends: Floats) -> tuple[Window, ...]:
    """The series that a silo would report for steps that end at ``ends``; no load of others is simulated."""
    steps = len(ends)
    marks = np.unique(np.linspace(0, steps, min(steps, MAX_WINDOWS) + 1).astype(np.int64))
    times = np.concatenate([[start_s], ends])[marks]
    speeds = batch_size * np.diff(marks) / np.diff(times)
    return tuple(Window(float(speed)) for speed in speeds)
