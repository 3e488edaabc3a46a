"""One barrier, silos that take so long for an order, and nothing else: when it commits whom, and when it releases."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fedsync.core.orders import LocalWork, SiloFacts, UpdateMeta, WorkOrder
from fedsync.core.protocols import AnyBarrier
from fedsync.core.views import ClusterView, SiloView, Verdict


@dataclass
class Rounds:
    """Silos under a barrier; each is told how long its next order takes, or that it fails.

    Args:
        barrier: is asked at every arrival and when it wants to be, and no more.
    """

    barrier: AnyBarrier
    now_s: float = 0.0
    version: int = 0
    silos: dict[str, SiloView] = field(default_factory=dict)
    pending: dict[str, UpdateMeta] = field(default_factory=dict)
    commits: list[tuple[float, tuple[str, ...]]] = field(default_factory=list)
    discards: list[tuple[float, str]] = field(default_factory=list)
    released: list[tuple[float, str]] = field(default_factory=list)
    halted: list[tuple[float, str]] = field(default_factory=list)
    wake_s: float = math.inf
    state: Any = None
    serial: int = 0

    def __post_init__(self) -> None:
        self.state = self.barrier.init()

    def join(self, *names: str) -> None:
        for name in names:
            self.silos[name] = SiloView(SiloFacts(1000), since_s=self.now_s)
        self.ask()

    def finish(self, at_s: float, name: str, *, fails: bool = False) -> None:
        """The silo's order ends; alarms that are due before go off first."""
        self.wait(at_s)
        silo = self.silos[name]
        assert silo.order is not None, f"{name} has no order"
        if fails:
            self.silos[name] = replace(silo, order=None, since_s=at_s, failures=silo.failures + 1)
        else:
            update_id = silo.order.update_id
            self.pending[update_id] = UpdateMeta(update_id, name, silo.order.base_version, 4, 40, 1000, 8)
            self.silos[name] = silo.ended(at_s, 40, None, 0.0)
        self.ask()

    def wait(self, until_s: float) -> None:
        """Alarms go off, until then."""
        while self.wake_s < until_s:
            self.now_s, self.wake_s = self.wake_s, math.inf
            self.ask()
        self.now_s = until_s

    def ask(self) -> None:
        """As a coordinator does: again after each commit."""
        while True:
            work = {name: LocalWork(4, 10, 0.1) for name in self.silos}
            view = ClusterView(self.now_s, self.version, dict(self.silos), dict(self.pending), work, seed=1)
            self.state, verdict = self.barrier.decide(self.state, view)
            self._carry_out(verdict)
            if not verdict.commit:
                break
        if verdict.wake_at_s is not None and verdict.wake_at_s > self.now_s:
            self.wake_s = min(self.wake_s, verdict.wake_at_s)

    def _carry_out(self, verdict: Verdict) -> None:
        if verdict.commit:
            self.version += 1
            self.commits.append((self.now_s, tuple(sorted(self.pending.pop(each).silo for each in verdict.commit))))
        for update_id in verdict.discard:
            self.discards.append((self.now_s, self.pending.pop(update_id).silo))
        for name in verdict.release:
            silo = self.silos[name]
            assert silo.order is None
            self.serial += 1
            order = WorkOrder(f"{name}/{self.serial}", self.version, silo.clock + 1, 10, 4, 0.1, self.serial)
            self.silos[name] = silo.begun(order, self.now_s)
            self.released.append((self.now_s, name))
        self.halted += [(self.now_s, name) for name in verdict.stop_now]

    def round(self, durations: Mapping[str, float]) -> None:
        """The orders in work take so long from when they began; only those named end."""
        ends = {name: self.silos[name].since_s + seconds for name, seconds in durations.items()}
        for name in sorted(ends, key=lambda each: (ends[each], each)):
            self.finish(ends[name], name)
