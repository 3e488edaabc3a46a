"""Simulated machines: speed over time, duration of local training step by step, and outages.

A *piece* is (seconds, factor): from that time until the next piece, the machine runs at ``factor`` times its speed.
All loads consist of pieces, so work over any number of changes is a sum of rectangles.
"""

from __future__ import annotations

import csv
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TextIO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedsync.common.errors import ConfigError
from fedsync.common.rng import Stream, generator
from fedsync.config.cluster import CrashesConfig, MarkovConfig, SiloConfig, WindowsConfig
from fedsync.core.orders import Window, WorkOrder
from fedsync.core.report_checks import MAX_WINDOWS

Floats = NDArray[np.float64]
Piece: TypeAlias = tuple[float, float]

MOST_FACTOR = 1000.0
"""Largest factor of a trace; larger values are probably speeds or per cent."""

_NEVER: Piece = (math.inf, 1.0)
_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Trace:
    """Speed multiplier over time: ``factors[i]`` holds from ``seconds[i]`` to the next time, the last for ever. Both
    are float64 [points]: ``seconds`` strictly ascending, from 0 on; ``factors`` non-negative, the last positive.
    """

    seconds: Floats
    factors: Floats

    @classmethod
    def load(cls, path: Path) -> Trace:
        """Read a CSV file with the columns ``seconds, factor``; `ConfigError` with the line of an invalid row."""
        try:
            with path.open(newline="", encoding="utf-8-sig") as file:
                rows = _rows(file, path)
        except UnicodeDecodeError as error:
            raise ConfigError(str(path), "not text", "Save it as UTF-8") from error
        if not rows or rows[-1][1] == 0:
            raise ConfigError(str(path), "the trace ends at a standstill", "End it with a positive factor")
        seconds, factors = (np.array(column) for column in zip(*rows, strict=True))
        seconds[0] = 0.0
        return cls(seconds, factors)

    def pieces(self) -> Iterator[Piece]:
        return zip(self.seconds.tolist(), self.factors.tolist(), strict=True)


def _rows(file: TextIO, path: Path) -> list[Piece]:
    rows: list[Piece] = []
    reader = csv.DictReader(file, skipinitialspace=True)
    if reader.fieldnames is None or not {"seconds", "factor"} <= set(reader.fieldnames):
        raise ConfigError(str(path), "its columns are not `seconds, factor`", "Write this header")
    for row in reader:
        place = f"{path}, line {reader.line_num}"
        try:
            second, factor = float(row["seconds"]), float(row["factor"])
        except (TypeError, ValueError) as error:
            raise ConfigError(place, f"not two numbers: {row}", "Write seconds,factor") from error
        if not (0 <= second < math.inf and 0 <= factor <= MOST_FACTOR):
            remedy = f"Write seconds from 0 on and factors from 0 to {MOST_FACTOR:g}"
            raise ConfigError(place, f"{row} is out of range", remedy)
        if rows and second <= rows[-1][0]:
            raise ConfigError(place, f"second {second} does not follow {rows[-1][0]}", "Sort by time")
        rows.append((second, factor))
    return rows


def markov(config: MarkovConfig, silo: str, seed: int) -> Iterator[Piece]:
    """Yield contention as a two-state continuous-time Markov chain with exponential holding times, for ever.

    The chain begins in its stationary distribution: on with probability ``on_s / (on_s + off_s)``. The first state
    comes from (seed, silo), the holding times in blocks of 16 from (seed, silo, block).
    """
    on = bool(generator(seed, Stream.CONTENTION, silo).random() < config.on_s / (config.on_s + config.off_s))
    now_s = 0.0
    for block in itertools.count(1):
        for draw in generator(seed, Stream.CONTENTION, silo, block).exponential(size=_BLOCK).tolist():
            yield now_s, config.factor if on else 1.0
            now_s += draw * (config.on_s if on else config.off_s)
            on = not on


def product(loads: Sequence[Iterator[Piece]]) -> Iterator[Piece]:
    """Yield the pieces of simultaneous loads, whose factors multiply. A load begins at 0, and keeps its last factor."""
    factors = [next(load)[1] for load in loads]
    following = [next(load, _NEVER) for load in loads]
    now_s = 0.0
    while now_s < math.inf:
        yield now_s, math.prod(factors)
        now_s = min(begin_s for begin_s, _ in following)
        for index, (begin_s, factor) in enumerate(following):
            if begin_s == now_s:
                factors[index] = factor
                following[index] = next(loads[index], _NEVER)


class Load:
    """Lazy speed over time under several loads: pieces are computed on demand and dropped once they are past."""

    __slots__ = ("_following", "_known", "_pieces")

    def __init__(self, loads: Sequence[Iterator[Piece]]) -> None:
        self._pieces = loads[0] if len(loads) == 1 else product(loads)
        self._known = [next(self._pieces)]
        self._following = next(self._pieces, _NEVER)

    def ends(self, start_s: float, work_s: Floats) -> Floats:
        """Return the end of work begun at ``start_s``, float64 [k], seconds since the start of the run. ``start_s``
        must not decrease between calls. ``work_s``, float64 [k], ascending, is seconds of work at factor 1.
        """
        self._forget(start_s)
        # Rectangles from start_s on: begin of each, work done by then, and factor.
        edges, done, factors = [start_s], [0.0], [self._known[0][1]]
        total = float(work_s[-1])
        for index in itertools.count(1):
            if index == len(self._known) and not self._extend():
                break
            begin_s, factor = self._known[index]
            gained = done[-1] + (begin_s - edges[-1]) * factors[-1]
            if gained >= total:
                break
            edges.append(begin_s)
            done.append(gained)
            factors.append(factor)
        # The first edge at or beyond the work closes the rectangle in which the work ends. The rectangle before that
        # edge has a positive factor, otherwise no work would have been done in it.
        at = np.maximum(np.searchsorted(done, work_s, side="left") - 1, 0)
        ends: Floats = np.array(edges)[at] + (work_s - np.array(done)[at]) / np.array(factors)[at]
        return ends

    def _extend(self) -> bool:
        if self._following is _NEVER:
            return False
        self._known.append(self._following)
        self._following = next(self._pieces, _NEVER)
        return True

    def _forget(self, start_s: float) -> None:
        over = 0
        while over + 1 < len(self._known) or self._extend():
            if self._known[over + 1][0] > start_s:
                break
            over += 1
        del self._known[:over]


class Course(NamedTuple):
    """End times of an order's local steps: ``begin_s + after_s[k]`` seconds since the run began. The sum is not stored:
    orders of the same size share the array, and usually only its last element is needed.
    """

    begin_s: float
    after_s: Floats

    @property
    def last_s(self) -> float:
        return self.begin_s + float(self.after_s[-1])

    @property
    def ends(self) -> Floats:
        return self.begin_s + self.after_s

    def cut(self, steps: int) -> Course:
        return self if steps == len(self.after_s) else Course(self.begin_s, self.after_s[:steps])


def speed_windows(batch_size: int, start_s: float, ends: Floats) -> tuple[Window, ...]:
    """Speed windows of a report for steps that end at ``ends``; other programs' load is not simulated."""
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
        total = self._work(order)
        return Course(start_s, total) if self._load is None else Course(0.0, self._load.ends(start_s, total))

    def _work(self, order: WorkOrder) -> Floats:
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
    return loads


_CRASHES = 8


class Outage(NamedTuple):
    """Absence of a silo from ``at_s`` to ``back_s``, which may be infinite."""

    at_s: float
    back_s: float
    reason: str


def outages(config: SiloConfig, seed: int) -> Iterator[Outage]:
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
        draws = generator(seed, Stream.CRASHES, silo, block).exponential(
            (config.mtbf_s, config.repair_s), (_CRASHES, 2)
        )
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
