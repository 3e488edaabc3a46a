"""How long a simulated machine takes."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedsync.config.cluster import SiloConfig
from fedsync.core.checks import MAX_WINDOWS
from fedsync.core.errors import ConfigError
from fedsync.core.orders import Window, WorkOrder
from fedsync.core.rng import Stream, generator

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Trace:
    """A speed multiplier over time: ``factors[i]`` holds from ``seconds[i]`` to the next.

    The first factor also holds before its time, the last for ever.

    Args:
        seconds: float64 [points], strictly ascending, beginning at 0.
        factors: float64 [points], non-negative; the last is positive, so that work ends.
    """

    seconds: Floats
    factors: Floats

    @classmethod
    def load(cls, path: Path) -> Trace:
        """Read a CSV file with the columns ``seconds, factor``.

        Raises:
            ConfigError: a row is not usable; names the line.
        """
        rows: list[tuple[float, float]] = []
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if reader.fieldnames is None or not {"seconds", "factor"} <= set(reader.fieldnames):
                raise ConfigError(str(path), "its columns are not `seconds, factor`", "Write this header")
            for row in reader:
                place = f"{path}, line {reader.line_num}"
                try:
                    second, factor = float(row["seconds"]), float(row["factor"])
                except (TypeError, ValueError) as error:
                    raise ConfigError(place, f"not two numbers: {row}", "Write seconds,factor") from error
                if not (np.isfinite(second) and np.isfinite(factor) and factor >= 0):
                    raise ConfigError(place, f"{row} is out of range", "Write finite numbers, the factor not negative")
                if rows and second <= rows[-1][0]:
                    raise ConfigError(place, f"second {second} does not follow {rows[-1][0]}", "Sort by time")
                rows.append((second, factor))
        if not rows or rows[-1][1] == 0:
            raise ConfigError(str(path), "the trace ends at a standstill", "End it with a positive factor")
        seconds, factors = (np.array(column) for column in zip(*rows, strict=True))
        seconds[0] = 0.0
        return cls(seconds, factors)

    def ends(self, start_s: float, work_s: Floats) -> Floats:
        """When work begun at ``start_s`` is done.

        Args:
            start_s: seconds since the run began.
            work_s: float64 [k], ascending: seconds of work at factor 1.

        Returns:
            float64 [k], seconds since the run began.
        """
        done = np.concatenate([[0.0], np.cumsum(self.factors[:-1] * np.diff(self.seconds))])
        here = max(int(np.searchsorted(self.seconds, start_s, side="right")) - 1, 0)
        target = done[here] + (start_s - self.seconds[here]) * self.factors[here] + work_s
        # The first point at or beyond the target closes the segment in which the work ends; the
        # segment before such a point has a positive factor, or nothing would have been done in it.
        segment = np.maximum(np.searchsorted(done, target, side="left") - 1, here)
        ends: Floats = self.seconds[segment] + (target - done[segment]) / self.factors[segment]
        return ends


class Machine:
    """One silo's machine in virtual time.

    Args:
        config: its entry in the silo file.
        seed: of the run, for jitter.
    """

    def __init__(self, config: SiloConfig, seed: int) -> None:
        self.config = config
        self._seed = seed
        self._curve = config.build_curve()
        self._trace = Trace.load(Path(config.trace)) if config.trace is not None else None

    def step_ends(self, order: WorkOrder, start_s: float) -> Floats:
        """When each local step of an order ends, float64 [max_steps], seconds since the run began."""
        work = np.full(order.max_steps, self._curve.step_s(order.batch_size))
        if self.config.jitter > 0:
            noise = generator(self._seed, Stream.JITTER, self.config.name, order.round)
            work *= np.exp(noise.normal(0.0, self.config.jitter, order.max_steps))
        total = np.cumsum(work)
        return start_s + total if self._trace is None else self._trace.ends(start_s, total)


def speed_windows(batch_size: int, start_s: float, ends: Floats) -> tuple[Window, ...]:
    """The series that a silo would report for steps that end at ``ends``; no load of others is simulated."""
    steps = len(ends)
    marks = np.unique(np.linspace(0, steps, min(steps, MAX_WINDOWS) + 1).astype(np.int64))
    times = np.concatenate([[start_s], ends])[marks]
    speeds = batch_size * np.diff(marks) / np.diff(times)
    return tuple(Window(speed=float(speed), cpu=0.0, memory=0.0) for speed in speeds)
