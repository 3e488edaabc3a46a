"""Timing of a simulated machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fedsync.common.rng import Stream, generator
from fedsync.config.cluster import SiloConfig
from fedsync.core.orders import WorkOrder
from fedsync.simulation.load import Load, Piece, Trace, markov, periodic
from fedsync.simulation.machines import Course, Floats


class Machine:
    """Machine of one silo in virtual time; executes its orders one after the other."""

    __slots__ = ("_curve", "_exact", "_load", "_seconds_a_byte", "config", "latency_s", "overhead_s", "seed")

    def __init__(self, config: SiloConfig, seed: int) -> None:
        self.config = config
        self.seed = seed
        self.latency_s, self.overhead_s = config.latency_s, config.overhead_s
        self._curve = config.build_curve()
        loads = _loads(config, seed)
        self._load = Load(loads) if loads else None
        self._seconds_a_byte = 0.0 if config.bandwidth_mbps is None else 8e-6 / config.bandwidth_mbps
        # Without jitter, an order's duration depends on its size only, which seldom changes.
        self._exact: tuple[int, int, Floats] | None = None

    def transfer_s(self, nbytes: int) -> float:
        """Return the duration of a message one way [s]."""
        return self.latency_s + nbytes * self._seconds_a_byte

    def course(self, order: WorkOrder, start_s: float) -> Course:
        """Return the end of each local step of an order that begins at ``start_s`` after the start of the run."""
        total = self._work(order)
        return Course(start_s, total) if self._load is None else Course(0.0, self._load.ends(start_s, total))

    def _work(self, order: WorkOrder) -> Floats:
        """Return the end of each step on the idle machine [s], float64 [max_steps]."""
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
