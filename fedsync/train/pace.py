"""The pace of one order: when each local step ended, what it took, and whether another may begin.

The shipped loop and a user's own share it, so budgets, halts, emulated machines and reports of speed mean the same to
both.
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
    """Begins when it is made; `step` follows each local step, `finish` the last.

    A GPU is waited for at the ends of windows only, unless a budget or a throttle has to know how long each step took.

    Args:
        order: what is done.
        device: where.
        probe: what the machine does meanwhile.
        throttle: machine to emulate, if any; its sleeps count as compute time.
        watch: told after each step, if given; its time counts as compute time, so let it be quick.
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
        """Seconds of what is no training; see `untimed`."""
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
        """Processed so far."""
        return self.steps * self._order.batch_size

    @property
    def follows(self) -> bool:
        """Whether batches have the order's size; of short passes, every second is smaller."""
        return 3 * self.missized <= 2 * self.steps

    def step(self) -> bool:
        """Count a local step that was done; returns whether another may begin, as far as time and ``watch`` go."""
        self.steps += 1
        if self._stepwise:
            devices.synchronise(self._device)
        begun_s, now_s = self._step_s, perf_counter()
        if self._throttle is not None:
            # A deadline, not single sleeps: what one sleep takes too long, the next makes good.
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
        """What is done inside is no training: it uses up the order's time, and counts as overhead."""
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
        """Count all steps of an order at once, which nobody looked into."""
        self.steps = steps
        if self._throttle is not None:
            devices.synchronise(self._device)
            raw_s = (perf_counter() - self._start_s) / steps
            sleep(steps * self._throttle.sleep_s(self._order.batch_size, raw_s))

    def finish(self) -> None:
        """End the order: `compute_s` and `windows` are what it came to."""
        devices.synchronise(self._device)
        now_s = perf_counter()
        self.compute_s = now_s - self._start_s
        self.windows = self._series.finish(now_s, self.samples)


class BatchSizes:
    """Tells where a user's batches do not have the ordered size: once in the silo's own log, and in each report.

    Args:
        silo: its name.
    """

    def __init__(self, silo: str) -> None:
        self._silo = silo
        self._told = False

    def check(self, pace: Pace, follows: bool, problem: str) -> dict[str, float]:
        """Metrics that an order's report has of its batches."""
        if follows:
            return {}
        if not self._told:
            self._told = True
            logger.warning("silo %s: %s", self._silo, problem)
        return {MISSIZED: float(pace.steps)}
