"""How long a simulated machine takes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedsync.config.cluster import SiloConfig
from fedsync.core.checks import MAX_WINDOWS
from fedsync.core.orders import Window, WorkOrder
from fedsync.core.rng import Stream, generator
from fedsync.sim.load import Load, Piece, Trace, markov, periodic

Floats = NDArray[np.float64]


class Machine:
    """One silo's machine in virtual time. Its orders come one after the other.

    Args:
        config: its entry in the silo file.
        seed: of the run, for everything random.
    """

    __slots__ = ("_curve", "_exact", "_load", "_seconds_a_byte", "config", "seed")

    def __init__(self, config: SiloConfig, seed: int) -> None:
        self.config = config
        self.seed = seed
        self._curve = config.build_curve()
        loads = _loads(config, seed)
        self._load = Load(loads) if loads else None
        self._seconds_a_byte = 0.0 if config.bandwidth_mbps is None else 8e-6 / config.bandwidth_mbps
        # Without jitter an order's length follows from its size, which seldom changes.
        self._exact: tuple[int, int, Floats] | None = None

    def transfer_s(self, nbytes: int) -> float:
        """Seconds that a message of this size takes one way."""
        return self.config.latency_s + nbytes * self._seconds_a_byte

    def step_ends(self, order: WorkOrder, start_s: float) -> Floats:
        """When each local step of an order ends, float64 [max_steps], seconds since the run began."""
        total = self._work(order)
        return start_s + total if self._load is None else self._load.ends(start_s, total)

    def _work(self, order: WorkOrder) -> Floats:
        """Seconds until the end of each step on the idle machine, float64 [max_steps]."""
        batch_size, steps = order.batch_size, order.max_steps
        if self.config.jitter > 0:
            work = np.full(steps, self._curve.step_s(batch_size))
            noise = generator(self.seed, Stream.JITTER, self.config.name, order.round)
            work *= np.exp(noise.normal(0.0, self.config.jitter, steps))
            return np.cumsum(work)
        if self._exact is None or self._exact[:2] != (batch_size, steps):
            self._exact = (batch_size, steps, np.cumsum(np.full(steps, self._curve.step_s(batch_size))))
        return self._exact[2]


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
    return tuple(Window(speed=float(speed), cpu=0.0, memory=0.0) for speed in speeds)
