"""Machines as values: how long an order takes, step by step, without a clock and without training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fedsync.core.checks import MAX_WINDOWS
from fedsync.core.curve import Curve
from fedsync.core.orders import Window, WorkOrder

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


class RecordedMachine:
    """A machine as it was seen: a curve, and how fast against it the machine was over time, again and again.

    Args:
        curve: seconds of a step by its batch, and of an order besides.
        lengths: seconds of each piece of the record, all positive; none is a machine that is always as the curve says.
        factors: speed in each piece over that of the curve, all positive.
    """

    __slots__ = ("_done", "_edges", "_exact", "curve", "latency_s", "overhead_s")

    def __init__(self, curve: Curve, lengths: Sequence[float] = (), factors: Sequence[float] = ()) -> None:
        self.curve, self.latency_s, self.overhead_s = curve, 0.0, curve.overhead_s
        self._edges = np.concatenate([[0.0], np.cumsum(lengths)])
        self._done = np.concatenate([[0.0], np.cumsum(np.multiply(lengths, factors))])
        self._exact: tuple[int, int, Floats] | None = None

    def transfer_s(self, nbytes: int) -> float:
        """Nothing: what transfers take is a part of the overhead that was seen."""
        return 0.0

    def course(self, order: WorkOrder, start_s: float) -> Course:
        """When each local step of an order ends that begins at ``start_s``."""
        work = self._work(order.batch_size, order.max_steps)
        if len(self._edges) == 1:
            return Course(start_s, work)
        period_s, period = self._edges[-1], self._done[-1]
        begun = start_s // period_s * period + np.interp(start_s % period_s, self._edges, self._done)
        whole, rest = np.divmod(begun + work, period)
        return Course(0.0, np.maximum(whole * period_s + np.interp(rest, self._done, self._edges), start_s))

    def _work(self, batch_size: int, steps: int) -> Floats:
        """Seconds until the end of each step at the curve's speed, float64 [steps]."""
        if self._exact is None or self._exact[:2] != (batch_size, steps):
            self._exact = (batch_size, steps, self.curve.step_s(batch_size) * np.arange(1.0, steps + 1))
        return self._exact[2]
