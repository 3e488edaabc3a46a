"""How long a simulated machine takes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedsync.config.cluster import SiloConfig
from fedsync.core.checks import MAX_WINDOWS
from fedsync.core.orders import Window, WorkOrder
from fedsync.core.rng import Stream, generator
from fedsync.sim.load import Load, Piece, Trace, markov, periodic

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


class Machine:
    """One silo's machine in virtual time. Its orders come one after the other.

    Args:
        config: its entry in the silo file.
        seed: of the run, for everything random.
    """

    __slots__ = ("_curve", "_exact", "_load", "_seconds_a_byte", "config", "latency_s", "overhead_s", "seed")

    def __init__(self, config: SiloConfig, seed: int) -> None:
        self.config = config
        self.seed = seed
        self.latency_s, self.overhead_s = config.latency_s, config.overhead_s
        self._curve = config.build_curve()
        loads = _loads(config, seed)
        self._load = Load(loads) if loads else None
        self._seconds_a_byte = 0.0 if config.bandwidth_mbps is None else 8e-6 / config.bandwidth_mbps
        # Without jitter an order's length follows from its size, which seldom changes.
        self._exact: tuple[int, int, Floats] | None = None

    def transfer_s(self, nbytes: int) -> float:
        """Seconds that a message of this size takes one way."""
        return self.latency_s + nbytes * self._seconds_a_byte

    def course(self, order: WorkOrder, start_s: float) -> Course:
        """When each local step of an order ends that begins at ``start_s``, seconds since the run began."""
        total = self._work(order)
        return Course(start_s, total) if self._load is None else Course(0.0, self._load.ends(start_s, total))

    def _work(self, order: WorkOrder) -> Floats:
        """Seconds until the end of each step on the idle machine, float64 [max_steps]."""
        batch_size, steps = order.batch_size, order.max_steps
        if self.config.jitter > 0:
            work = np.full(steps, self._curve.step_s(batch_size))
            noise = generator(self.seed, Stream.JITTER, self.config.name, order.round)
            work *= np.exp(noise.normal(0.0, self.config.jitter, steps))
            return np.cumsum(work)
        known = self._exact
        if known is None or known[0] != batch_size or known[1] != steps:
            known = self._exact = (batch_size, steps, np.cumsum(np.full(steps, self._curve.step_s(batch_size))))
        return known[2]


def _loads(config: SiloConfig, seed: int) -> list[Iterator[Piece]]:
    loads: list[Iterator[Piece]] = []
    if config.trace is not None:
        loads.append(Trace.load(Path(config.trace)).pieces())
    if config.contention is not None:
        loads.append(markov(config.contention, config.name, seed))
    if config.load is not None:
        loads.append(periodic(config.load))
    return loads


def speed_windows(batch_size: int, start_s: float, ends: Floats) -> tuple[Window, ...]:
    """The series that a silo would report for steps that end at ``ends``; no load of others is simulated."""
    steps = len(ends)
    marks = np.unique(np.linspace(0, steps, min(steps, MAX_WINDOWS) + 1).astype(np.int64))
    times = np.concatenate([[start_s], ends])[marks]
    speeds = batch_size * np.diff(marks) / np.diff(times)
    return tuple(Window(float(speed)) for speed in speeds)
