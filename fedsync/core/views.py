"""Read-only state of silos for policies, and the verdict that a barrier returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fedsync.core.orders import LocalWork, SiloFacts, UpdateMeta, WorkOrder
from fedsync.core.speed.curve import Curve


@dataclass(frozen=True, slots=True)
class SiloView:
    """State of one silo, for policies.

    Args:
        clock: number of finished orders with an update.
        since_s: time at which the silo became busy or idle.
        forecast: predicted curve, or None before any observation.
        failures: number of consecutive failed orders.
        samples: samples processed in all orders.
        overhead_s: duration of the last order without its training [s].
        progress_steps: local steps reported for the running order.
    """

    facts: SiloFacts
    clock: int = 0
    order: WorkOrder | None = None
    since_s: float = 0.0
    forecast: Curve | None = None
    failures: int = 0
    samples: int = 0
    overhead_s: float = 0.0
    progress_steps: int = 0

    @property
    def busy(self) -> bool:
        return self.order is not None

    def order_s(self, work: LocalWork) -> float | None:
        """Return the predicted duration of an order [s], at least with the last order's overhead; None if unknown."""
        if self.forecast is None:
            return None
        return work.steps * self.forecast.step_s(work.batch_size) + max(self.forecast.overhead_s, self.overhead_s)

    def begun(self, order: WorkOrder, at_s: float) -> SiloView:
        # Positional arguments, here and in `ended`: a keyword costs 35 ns, and this runs for every order.
        return SiloView(
            self.facts, self.clock, order, at_s, self.forecast, self.failures, self.samples, self.overhead_s
        )

    def ended(self, at_s: float, samples: int, forecast: Curve | None, overhead_s: float) -> SiloView:
        done = self.samples + samples
        return SiloView(self.facts, self.clock + 1, None, at_s, forecast, 0, done, overhead_s)

    def failed(self, at_s: float) -> SiloView:
        return replace(self, order=None, since_s=at_s, failures=self.failures + 1, progress_steps=0)


@dataclass(frozen=True, slots=True)
class ClusterView:
    """Whole cluster at one instant. The mappings are read-only and live: do not keep them.

    Args:
        now_s: monotonic time since the start of the run [s].
        silos: name -> view, in order of joining.
        pending: update identifier -> meta of uncommitted updates, in order of arrival.
        work: name -> work of the silo if released now; computed at first access, in O(n).
        seed: seed of the run, for policies that draw.
        index: indexes of ``silos``; None to scan instead, as in a view of a part of the silos.
        windows: name -> end of the availability window and begin of the next [s], for part-time silos.
    """

    now_s: float
    version: int
    silos: Mapping[str, SiloView]
    pending: Mapping[str, UpdateMeta]
    work: Mapping[str, LocalWork] = field(default_factory=dict)
    seed: int = 0
    index: Roster | None = None
    windows: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def present_for_s(self, name: str) -> float | None:
        """Return the rest of a silo's availability window [s]; 0 outside a window, None for always or unknown."""
        window = self.windows.get(name)
        if window is None or self.now_s >= window[1]:
            return None
        return max(window[0] - self.now_s, 0.0)

    def has_time(self, name: str) -> bool:
        """Whether the predicted duration of an order fits an idle silo's window; True without a prediction."""
        left_s = self.present_for_s(name)
        if left_s is None or (order_s := self.silos[name].order_s(self.work[name])) is None:
            return True
        return order_s <= left_s

    @property
    def idle(self) -> tuple[str, ...]:
        """Names of the silos without an order, in order of joining; costs O(k log k) for k of them."""
        # For a large share of idle silos, one pass over all silos is cheaper than sorting.
        if self.index is None or 4 * len(self.index.idle) > len(self.silos) > 4:
            return tuple(name for name, silo in self.silos.items() if silo.order is None)
        return tuple(sorted(self.index.idle, key=self.index.idle.__getitem__))

    @property
    def names(self) -> Sequence[str]:
        return tuple(self.silos) if self.index is None else self.index.names

    @property
    def anyone_busy(self) -> bool:
        if self.index is not None:
            return len(self.index.idle) < len(self.silos)
        return any(silo.order is not None for silo in self.silos.values())


@dataclass(frozen=True, slots=True)
class Verdict:
    """Answer of a barrier, executed in the order of its fields.

    Args:
        rollback: restore the savepoint, as a new version.
        commit: identifiers of updates to fold into one new version; empty for none.
        discard: identifiers of pending updates to drop.
        savepoint: keep the current version for a later rollback.
        release: idle silos that get a new order from the newest version.
        steps: local steps of released silos; for absent silos, the sizing's steps.
        budget_s: training time limit of released silos [s]; no limit for absent silos.
        overrun: see `WorkOrder`.
        stop_now: busy silos that must stop after their current step.
        probe: busy silos that must report their progress.
        wake_at_s: latest time of the next call, or None.
        reason: explanation for users.
    """

    rollback: bool = False
    commit: tuple[str, ...] = ()
    discard: tuple[str, ...] = ()
    savepoint: bool = False
    release: tuple[str, ...] = ()
    steps: Mapping[str, int] = field(default_factory=dict)
    budget_s: Mapping[str, float] = field(default_factory=dict)
    overrun: float = 1.0
    stop_now: tuple[str, ...] = ()
    probe: tuple[str, ...] = ()
    wake_at_s: float | None = None
    reason: str = ""

    def by(self, at_s: float | None) -> Verdict:
        if at_s is None or (self.wake_at_s is not None and self.wake_at_s <= at_s):
            return self
        return replace(self, wake_at_s=at_s)


_set_item = dict[str, SiloView].__setitem__


class Roster(dict[str, SiloView]):
    """Name -> view, in order of joining; change it only by ``roster[name] = view`` and ``pop``.

    Attributes:
        idle: name -> rank in the order of joining, for silos without an order.
        revision: counter of joins, leaves, and assignments of facts or forecasts.
    """

    __slots__ = ("_joined", "_names", "_ranks", "idle", "revision")

    idle: dict[str, int]
    revision: int
    _ranks: dict[str, int]
    _joined: int
    _names: tuple[str, ...] | None

    def __init__(self) -> None:
        self.idle, self._ranks, self._joined, self.revision = {}, {}, 0, 0
        self._names = None

    def __setitem__(self, name: str, view: SiloView) -> None:
        before = self.get(name)
        if before is None:
            self._ranks[name] = self._joined
            self._joined += 1
            self._names = None
            self.revision += 1
        elif before.forecast is not view.forecast or before.facts is not view.facts:
            self.revision += 1
        _set_item(self, name, view)
        if view.order is None:
            self.idle[name] = self._ranks[name]
        else:
            self.idle.pop(name, None)

    def pop(self, name: str, default: Any = None) -> Any:
        if name in self:
            self.revision += 1
            self._names = None
            del self._ranks[name]
            self.idle.pop(name, None)
        return super().pop(name, default)

    @property
    def views(self) -> dict[str, SiloView]:
        return dict(self)

    @views.setter
    def views(self, views: Mapping[str, SiloView]) -> None:
        self.clear()
        self.update(views)
        self._names = None

    @property
    def names(self) -> Sequence[str]:
        if self._names is None:
            self._names = tuple(self)
        return self._names
