"""Clock of one order: end and duration of each local step, and whether another step may begin.

The shipped loop and a user's own loop share this clock. Budgets, halts, emulated machines and speed reports therefore
mean the same in both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter, sleep

import torch

from fedsync.common import foreign
from fedsync.core.orders import MISSIZED, Window, WorkOrder
from fedsync.core.speed.curve import may_begin
from fedsync.train.machine import device as devices
from fedsync.train.machine.machine_probe import MachineProbe, Series
from fedsync.train.machine.throttle import Throttle
from fedsync.train.silo_trainer import Watch

logger = foreign.logger(__name__)


class Pace:
    """Clock that starts at construction; call `step` after each local step and `finish` after the last.

    A GPU is synchronised only at the ends of windows, unless a budget or a throttle needs each step's time.

    Args:
        throttle: machine to emulate; its sleeps count as compute time.
        watch: called after each step; its time counts as compute time, so the call should be quick.
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
        """Time that is not training; see `untimed` [s]."""
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
        """End the order; set `compute_s` and `windows`."""
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
        """Return the metric for the order's report: empty if batch sizes are right."""
        if follows:
            return {}
        if not self._told:
            self._told = True
            logger.warning("silo %s: %s", self._silo, problem)
        return {MISSIZED: float(pace.steps)}
