"""Simulated machines: the duration of orders step by step, and outages; without a clock and without training."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedsync.common.rng import Stream, generator
from fedsync.config.cluster import CrashesConfig, SiloConfig, WindowsConfig
from fedsync.core.orders import Window, WorkOrder
from fedsync.core.report_checks import MAX_WINDOWS
from fedsync.simulation.load import Load, Piece, Trace, markov, periodic

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


def speed_windows(batch_size: int, start_s: float, ends: Floats) -> tuple[Window, ...]:
    """Return the speed windows of a report for steps that end at ``ends``; load of other programs is not simulated."""
    steps = len(ends)
    marks = np.unique(np.linspace(0, steps, min(steps, MAX_WINDOWS) + 1).astype(np.int64))
    times = np.concatenate([[start_s], ends])[marks]
    speeds = batch_size * np.diff(marks) / np.diff(times)
    return tuple(Window(float(speed)) for speed in speeds)


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


_BLOCK = 8


class Outage(NamedTuple):
    """Absence of a silo from ``at_s`` to ``back_s``, which may be infinite."""

    at_s: float
    back_s: float
    reason: str


def outages(config: SiloConfig, seed: int) -> Iterator[Outage]:
    """Yield all absences of a silo after its first join, in order; touching absences are merged."""
    kinds: list[Iterator[Outage]] = [
        iter(sorted(Outage(fault.at_s, fault.at_s + fault.down_s, "fault by plan") for fault in config.faults))
    ]
    if config.crashes is not None:
        kinds.append(_crashes(config.crashes, config.name, config.joins_at_s, seed))
    if config.presence is not None:
        kinds.append(_closed(config.presence, config.joins_at_s))
    if config.leaves_at_s is not None:
        kinds.append(iter([Outage(config.leaves_at_s, math.inf, "left")]))
    return _united(heapq.merge(*kinds))


def _crashes(config: CrashesConfig, silo: str, joins_at_s: float, seed: int) -> Iterator[Outage]:
    """Yield crashes with exponential times to failure and of repair, in blocks of 8 from (seed, silo, block)."""
    now_s = joins_at_s
    for block in itertools.count():
        draws = generator(seed, Stream.CRASHES, silo, block).exponential((config.mtbf_s, config.repair_s), (_BLOCK, 2))
        for up_s, down_s in draws.tolist():
            at_s = now_s + up_s
            now_s = at_s + down_s
            yield Outage(at_s, now_s, "crash")


def _closed(windows: WindowsConfig, joins_at_s: float) -> Iterator[Outage]:
    for number in itertools.count():
        begin_s = joins_at_s + number * windows.every_s
        yield Outage(begin_s + windows.for_s, begin_s + windows.every_s, "its window is over")


def _united(spans: Iterator[Outage]) -> Iterator[Outage]:
    current = next(spans, None)
    while current is not None:
        following = next(spans, None) if current.back_s < math.inf else None
        if following is not None and following.at_s <= current.back_s:
            current = current._replace(back_s=max(current.back_s, following.back_s))
            continue
        yield current
        current = following
