"""FedCompass: numbers of local steps with which silos of unequal speed send their updates in groups.

A *group* is a set of silos that should arrive together. It has an expected time and a later latest time. When it ends,
at its latest time at the latest, the updates that have arrived are committed.
- A silo of unknown speed does ``min_steps`` steps, outside any group. Its update is committed on arrival.
- A silo that continues joins the group in whose remaining time it can do the most steps, between ``min_steps`` and
  ``max_steps``. If no group fits, the silo founds a group.
- A silo that founds a group tries to arrive together with another group's next arrival. This arrival is expected at the
  other group's latest time plus the shortest duration of ``max_steps`` steps among its members, overhead included. The
  silo does as many steps as fit until then, at least ``min_steps``. Groups that would need more than ``max_steps`` are
  ignored. Of the remaining groups, the one with most steps is chosen; without any, the silo does ``max_steps``.

No silo waits for ever: a group ends when none of its silos is busy, or at its latest time. A failed or lost silo leaves
its group. A late silo belongs to no group: it continues at once, and its update waits for the next commit.

The authors' scheduler (APPFL, ``CompassScheduler``) gives an unknown silo ``max_steps``, prefers the younger of two
groups that allow equally many steps, and scales overhead with the steps. In that scheduler, a late arrival may delete a
group, whose other silos then wait for ever.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge

from fedsync.core.views import ClusterView, SiloView, Verdict
from fedsync.policies.barrier.barrier_base import BarrierPolicy
from fedsync.policies.barrier.kinds.ssp import Failures, failed, ready
from fedsync.policies.schema import PositiveInt, register


@dataclass(frozen=True, slots=True)
class ArrivalGroup:
    """Silos that should arrive together at ``expected_s`` (T_a in the paper), by ``latest_s`` (T_max) at the latest."""

    members: tuple[str, ...]
    expected_s: float
    latest_s: float


@dataclass(frozen=True, slots=True)
class CompassState:
    """State of `Compass`; ``late`` names the busy silos whose group has ended."""

    failures: Failures = field(default_factory=dict)
    groups: tuple[ArrivalGroup, ...] = ()
    late: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class SiloPace:
    """Predicted duration of an order: ``overhead_s + steps * step_s``."""

    step_s: float
    overhead_s: float

    def steps(self, seconds: float) -> int:
        # The tolerance keeps a silo that arrives exactly on time from losing a step to rounding.
        return math.floor((seconds - self.overhead_s) / self.step_s + 1e-6)

    def seconds(self, steps: int) -> float:
        return self.overhead_s + steps * self.step_s


@register("fedcompass")
@dataclass(frozen=True, slots=True)
class Compass(BarrierPolicy[CompassState]):
    """FedCompass barrier: each silo gets ``min_steps`` to ``max_steps`` steps, so that silos arrive in groups.

    Durations include the overhead of the silo's last order. The paper counts only local steps per second.

    Source: FedCompass (Li et al. 2024, arXiv:2309.14675), the Compass scheduler.
    """

    min_steps: PositiveInt = 20
    """Fewest local steps of an order; Q_min in the paper."""

    max_steps: PositiveInt = 100
    """Most local steps of an order; Q_max in the paper."""

    latest_factor: Annotated[float, Ge(1)] = 1.2
    """Longest wait for a group, as a multiple of its expected duration; lambda in the paper."""

    sets_steps = True

    def __post_init__(self) -> None:
        if self.max_steps < self.min_steps:
            raise ValueError(f"max_steps {self.max_steps} lies below min_steps {self.min_steps}; raise max_steps")

    def init(self) -> CompassState:
        return CompassState()

    def decide(self, state: CompassState, view: ClusterView) -> tuple[CompassState, Verdict]:
        failures = failed(state.failures, view.idle, view)
        groups, late, complete = self._close(state, view)
        waiting = {name for group in groups for name in group.members if view.silos[name].order is None}
        ready_to_commit = tuple(update_id for update_id, meta in view.pending.items() if meta.silo not in waiting)
        if ready_to_commit and (complete or not groups or self._newcomer(state, view, waiting)):
            reason = f"{len(ready_to_commit)} updates: " + (
                "a group is over" if complete else "a silo without a group is in"
            )
            return CompassState(failures, tuple(groups), late), Verdict(commit=ready_to_commit, reason=reason)
        return self._release(CompassState(failures, tuple(groups), late), view, waiting)

    @staticmethod
    def _close(state: CompassState, view: ClusterView) -> tuple[list[ArrivalGroup], frozenset[str], bool]:
        sent = {meta.silo for meta in view.pending.values()}
        working = {name for name, silo in view.silos.items() if silo.order is not None}
        groups: list[ArrivalGroup] = []
        late = state.late & working
        complete = False
        for group in state.groups:
            members = tuple(name for name in group.members if name in working or (name in view.silos and name in sent))
            at_work = working.intersection(members)
            if at_work and view.now_s < group.latest_s:
                groups.append(ArrivalGroup(members, group.expected_s, group.latest_s))
            else:
                late |= at_work
                complete |= len(at_work) < len(members)
        return groups, late, complete

    @staticmethod
    def _newcomer(state: CompassState, view: ClusterView, waiting: set[str]) -> bool:
        for meta in view.pending.values():
            silo = view.silos.get(meta.silo)
            if silo is not None and silo.order is None and meta.silo not in waiting and meta.silo not in state.late:
                return True
        return False

    def _release(self, state: CompassState, view: ClusterView, waiting: set[str]) -> tuple[CompassState, Verdict]:
        paces = {name: self._pace(view, name) for name in view.silos}
        idle = [name for name in ready(state.failures, view.idle, view) if name not in waiting]
        idle.sort(key=lambda name: pace.step_s if (pace := paces[name]) is not None else 0.0)
        groups, steps, told = list(state.groups), {}, []
        for name in idle:
            pace = paces[name]
            if pace is None:
                steps[name] = self.min_steps
                told.append(f"{name} is measured")
                continue
            index, steps[name] = self._join(groups, pace, view.now_s)
            if index is None:
                steps[name] = self._found(groups, paces, pace, view.now_s)
                seconds = pace.seconds(steps[name])
                groups.append(ArrivalGroup((name,), view.now_s + seconds, view.now_s + self.latest_factor * seconds))
                told.append(f"{name} founds a group for {view.now_s + seconds:.1f} s with {steps[name]} steps")
            else:
                group = groups[index]
                groups[index] = ArrivalGroup((*group.members, name), group.expected_s, group.latest_s)
                told.append(f"{name} joins the group of {group.expected_s:.1f} s with {steps[name]} steps")
        verdict = Verdict(
            release=tuple(idle),
            steps=steps,
            wake_at_s=min((group.latest_s for group in groups), default=None),
            reason="; ".join(told) or f"{len(waiting)} silos wait for their group",
        )
        return CompassState(state.failures, tuple(groups), state.late), verdict

    @staticmethod
    def _pace(view: ClusterView, name: str) -> SiloPace | None:
        silo: SiloView = view.silos[name]
        if silo.forecast is None:
            return None
        return SiloPace(silo.forecast.step_s(view.work[name].batch_size), silo.overhead_s)

    def _join(self, groups: list[ArrivalGroup], pace: SiloPace, now_s: float) -> tuple[int | None, int]:
        best, most = None, 0
        for index, group in enumerate(groups):
            steps = pace.steps(group.expected_s - now_s)
            if max(self.min_steps, most + 1) <= steps <= self.max_steps:
                best, most = index, steps
        return best, most

    def _found(
        self, groups: list[ArrivalGroup], paces: dict[str, SiloPace | None], pace: SiloPace, now_s: float
    ) -> int:
        most = 0
        for group in groups:
            known = [other for name in group.members if (other := paces.get(name)) is not None]
            again_s = min((other.seconds(self.max_steps) for other in known), default=math.inf)
            steps = pace.steps(group.latest_s - now_s + again_s) if known else math.inf
            if steps <= self.max_steps:
                most = max(most, int(steps), self.min_steps)
        return most or self.max_steps
