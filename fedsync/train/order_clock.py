"""Clock of one order: times each local step, decides whether another step may begin, measures the machine's load."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter, sleep

import numpy as np
import torch
from numpy.typing import NDArray

from fedsync.common import foreign
from fedsync.core.orders import MISSIZED, Window, WorkOrder
from fedsync.core.speed.curve import may_begin
from fedsync.train.machine import device as devices
from fedsync.train.machine.resources import Resources
from fedsync.train.silo_trainer import Throttle, Watch

logger = foreign.logger(__name__)


class Pace:
    """Clock that starts at construction; call `step` after each local step and `finish` after the last. A GPU is
    synchronised only at the ends of windows, unless a budget or a throttle needs each step's time.
    """

    def __init__(
        self,
        order: WorkOrder,
        device: torch.device,
        probe: MachineProbe,
        throttle: Throttle | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.steps = self.missized = 0
        self.compute_s = 0.0
        self.windows: tuple[Window, ...] = ()
        self.untimed_s = 0.0
        self._inside = False
        self._order = order
        self._device = device
        self._throttle = throttle
        self._watch = watch
        self._budget_s = math.inf if order.budget_s is None else order.budget_s
        self._stepwise = throttle is not None or order.budget_s is not None
        devices.synchronise(device)
        probe.start(perf_counter())
        self._start_s = self._step_s = self._deadline_s = perf_counter()
        self._series = Series(probe, self._start_s)

    @property
    def samples(self) -> int:
        return self.steps * self._order.batch_size

    @property
    def follows(self) -> bool:
        """Whether at least a third of the batches has the order's size; short passes often end in a smaller batch."""
        return 3 * self.missized <= 2 * self.steps

    def step(self) -> bool:
        """Count a finished local step; return whether time and ``watch`` allow another."""
        self.steps += 1
        if self._stepwise:
            devices.synchronise(self._device)
        begun_s, now_s = self._step_s, perf_counter()
        if self._throttle is not None:
            # A deadline instead of single sleeps: a sleep that is too long shortens the next.
            raw_s = now_s - begun_s
            self._deadline_s += raw_s + self._throttle.sleep_s(self._order.batch_size, raw_s)
            sleep(max(0.0, self._deadline_s - now_s))
            now_s = perf_counter()
        if now_s >= self._series.due_s:
            devices.synchronise(self._device)
            now_s = perf_counter()
            self._series.close(now_s, self.samples)
        self._step_s = now_s
        gone_s = now_s - self._start_s + self.untimed_s
        goes = self._budget_s == math.inf or may_begin(gone_s, now_s - begun_s, self._budget_s, self._order.overrun)
        return goes and (self._watch is None or self._watch(self.steps, self.samples))

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """Exclude the time inside from training; it counts as overhead and does use up the order's budget."""
        if self._inside:
            yield
            return
        devices.synchronise(self._device)
        begin_s, self._inside = perf_counter(), True
        try:
            yield
        finally:
            devices.synchronise(self._device)
            gone_s, self._inside = perf_counter() - begin_s, False
            self.untimed_s += gone_s
            self._start_s += gone_s
            self._step_s += gone_s
            self._deadline_s += gone_s
            self._series.skip(gone_s)

    def jump(self, steps: int) -> None:
        """Count all steps of an order at once, for training code whose steps are not visible."""
        self.steps = steps
        if self._throttle is not None:
            devices.synchronise(self._device)
            raw_s = (perf_counter() - self._start_s) / steps
            sleep(steps * self._throttle.sleep_s(self._order.batch_size, raw_s))

    def finish(self) -> None:
        devices.synchronise(self._device)
        now_s = perf_counter()
        self.compute_s = now_s - self._start_s
        self.windows = self._series.finish(now_s, self.samples)


class BatchSizes:
    """Warning about user batches that do not have the ordered size: logged once, and reported as a metric."""

    def __init__(self, silo: str) -> None:
        self._silo = silo
        self._told = False

    def check(self, pace: Pace, follows: bool, problem: str) -> dict[str, float]:
        if follows:
            return {}
        if not self._told:
            self._told = True
            logger.warning("silo %s: %s", self._silo, problem)
        return {MISSIZED: float(pace.steps)}


WINDOW_S = 0.05
MOST_WINDOWS = 64

Shares = tuple[float | None, float | None]
"""Share of processors available to the trainer, and memory pressure, both 0..1; None if unknown or disabled."""


class MachineProbe:
    """Probe that reads `Shares` at most every 50 ms, which takes about 0.1 ms; without ``enabled``, never."""

    def __init__(self, device: torch.device, enabled: bool, resources: Resources | None = None) -> None:
        self._device = device
        self._resources = (resources or Resources()) if enabled else None
        self._read_s = -math.inf
        self._shares: Shares = (None, None)
        self._peak_bytes = 0

    def start(self, now_s: float) -> None:
        """Begin an order: discard data from before, unless the last reading is less than 50 ms old."""
        if self._resources is not None and now_s - self._read_s >= WINDOW_S:
            self._resources.begin(now_s)

    def read(self, now_s: float) -> Shares:
        """Return means since the last reading; repeat the last reading if it is less than 50 ms old."""
        if self._resources is not None and now_s - self._read_s >= WINDOW_S:
            self._read_s = now_s
            cpu, memory = self._resources.read(now_s)
            self._peak_bytes = max(self._peak_bytes, devices.held_bytes(self._device))
            if self._device.type == "cuda":
                memory = devices.gpu_memory_share(self._device)
            self._shares = cpu, memory
        return self._shares

    def metrics(self) -> dict[str, float]:
        """Metrics for `WorkReport.metrics`: this process's peak memory, over all readings or, on a GPU, at any time."""
        return {"peak_memory_bytes": float(self._peak_bytes)} if self._peak_bytes else {}


class Series:
    """Time series of one order, with at most 64 windows; the probe is read once per window.

    A window closes at the first step boundary 50 ms after it opened. At 64 windows, neighbours merge and the window
    length doubles, so any order gives a series of bounded size.
    """

    def __init__(self, probe: MachineProbe, now_s: float) -> None:
        self._probe = probe
        self._opened_s = now_s
        self._length_s = WINDOW_S
        # Seconds, samples, and shares times seconds; NaN if unknown. Two spans add up exactly.
        self._spans: list[NDArray[np.float64]] = []
        self._samples = 0
        self.due_s = now_s + WINDOW_S

    def close(self, now_s: float, samples: int) -> None:
        """End the current window at ``now_s``; the device is synchronised, and ``samples`` counts the whole order."""
        seconds = now_s - self._opened_s
        sums = (math.nan if share is None else share * seconds for share in self._probe.read(now_s))
        self._spans.append(np.array([seconds, samples - self._samples, *sums]))
        if len(self._spans) == MOST_WINDOWS:
            self._spans = list(map(np.add, self._spans[::2], self._spans[1::2]))
            self._length_s *= 2
        self._opened_s, self._samples = now_s, samples
        self.due_s = now_s + self._length_s

    def skip(self, seconds: float) -> None:
        self._opened_s += seconds
        self.due_s += seconds

    def finish(self, now_s: float, samples: int) -> tuple[Window, ...]:
        """Return all windows; a last window shorter than half the length merges with its neighbour."""
        if samples > self._samples:
            short = now_s - self._opened_s < self._length_s / 2
            self.close(now_s, samples)
            if short and len(self._spans) > 1:
                last = self._spans.pop()
                self._spans[-1] = self._spans[-1] + last
        return tuple(map(_window, self._spans))


def _window(span: NDArray[np.float64]) -> Window:
    seconds, samples, *sums = span.tolist()
    cpu, memory = (None if math.isnan(total) else total / seconds for total in sums)
    return Window(samples / seconds, cpu, memory)
