"""One barrier, silos that take so long for an order, and nothing else: when it commits whom, and when it releases."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fedsync.core.orders import LocalWork, SiloFacts, UpdateMeta, WorkOrder
from fedsync.core.protocols import AnyBarrier
from fedsync.core.speed.curve import Curve
from fedsync.core.views import ClusterView, SiloView, Verdict


@dataclass
class Rounds:
    """Silos under a barrier; each is told how long its next order takes, or that it fails.

    Args:
        barrier: is asked at every arrival and when it wants to be, and no more.
        seed: of the run.
        speeds: samples per second of the silos that are measured by their first order.
        overheads: what an order of theirs costs besides training [s]; nothing, of those that are not here.
        examples: training samples that silos hold; 1000, those that are not here.
    """

    barrier: AnyBarrier
    seed: int = 1
    speeds: Mapping[str, float] = field(default_factory=dict)
    overheads: Mapping[str, float] = field(default_factory=dict)
    examples: Mapping[str, int] = field(default_factory=dict)
    now_s: float = 0.0
    version: int = 0
    silos: dict[str, SiloView] = field(default_factory=dict)
    pending: dict[str, UpdateMeta] = field(default_factory=dict)
    commits: list[tuple[float, tuple[str, ...]]] = field(default_factory=list)
    discards: list[tuple[float, str]] = field(default_factory=list)
    released: list[tuple[float, str]] = field(default_factory=list)
    halted: list[tuple[float, str]] = field(default_factory=list)
    saved: int | None = None
    returns: list[tuple[float, int | None]] = field(default_factory=list)
    wake_s: float = math.inf
    state: Any = None
    serial: int = 0

    def __post_init__(self) -> None:
        self.state = self.barrier.init()

    def join(self, *names: str) -> None:
        for name in names:
            self.silos[name] = SiloView(SiloFacts(self.examples.get(name, 1000)), since_s=self.now_s)
        self.ask()

    def leave(self, name: str) -> None:
        """The silo is lost; an update of its that is in stays."""
        del self.silos[name]
        self.ask()

    def tell(self, name: str, steps: int) -> None:
        """A silo at work says how far it is."""
        self.silos[name] = replace(self.silos[name], progress_steps=steps)
        self.ask()

    def finish(self, at_s: float, *names: str, fails: bool = False, steps: int | None = None) -> None:
        """Orders end in one instant, after so many steps; alarms that are due before go off first."""
        self.wait(at_s)
        for name in names:
            silo, order = self.silos[name], self.order(name)
            if fails:
                self.silos[name] = replace(silo, order=None, since_s=at_s, failures=silo.failures + 1)
                continue
            done = order.max_steps if steps is None else steps
            samples, examples = done * order.batch_size, silo.facts.examples
            self.pending[order.update_id] = UpdateMeta(
                order.update_id, name, order.base_version, done, samples, examples, 8, loss=1.0 / (1 + self.version)
            )
            forecast = Curve(self.speeds[name]) if name in self.speeds else None
            self.silos[name] = silo.ended(at_s, samples, forecast, self.overheads.get(name, 0.0))
        self.ask()

    def order(self, name: str) -> WorkOrder:
        order = self.silos[name].order
        assert order is not None, f"{name} has no order"
        return order

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
            view = ClusterView(self.now_s, self.version, dict(self.silos), dict(self.pending), work, self.seed)
            self.state, verdict = self.barrier.decide(self.state, view)
            self._carry_out(verdict)
            if not verdict.commit:
                break
        if verdict.wake_at_s is not None and verdict.wake_at_s > self.now_s:
            self.wake_s = min(self.wake_s, verdict.wake_at_s)

    def _carry_out(self, verdict: Verdict) -> None:
        if verdict.rollback:
            self.version += 1
            self.returns.append((self.now_s, self.saved))
        if verdict.commit:
            self.version += 1
            self.commits.append((self.now_s, tuple(sorted(self.pending.pop(each).silo for each in verdict.commit))))
        for update_id in verdict.discard:
            self.discards.append((self.now_s, self.pending.pop(update_id).silo))
        if verdict.savepoint:
            self.saved = self.version
        for name in verdict.release:
            silo, steps, budget_s = self.silos[name], verdict.steps.get(name, 4), verdict.budget_s.get(name)
            assert silo.order is None
            self.serial += 1
            update_id = f"{name}/{self.serial}"
            order = WorkOrder(update_id, self.version, silo.clock + 1, 10, steps, 0.1, self.serial, budget_s)
            self.silos[name] = silo.begun(order, self.now_s)
            self.released.append((self.now_s, name))
        self.halted += [(self.now_s, name) for name in verdict.stop_now]

    def round(self, durations: Mapping[str, float]) -> None:
        """The orders in work take so long from when they began; only those named end."""
        ends = {name: self.silos[name].since_s + seconds for name, seconds in durations.items()}
        for name in sorted(ends, key=lambda each: (ends[each], each)):
            self.finish(ends[name], name)
