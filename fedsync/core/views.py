"""What policies see, and what a barrier answers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from fedsync.core.orders import LocalWork, SiloFacts, UpdateMeta, WorkOrder, fast_dataclass
from fedsync.core.speed.curve import Curve


@fast_dataclass
@dataclass(frozen=True, slots=True)
class SiloView:
    """One silo as policies see it.

    Args:
        facts: what the silo said when it joined.
        clock: orders it has finished with an update.
        order: the order in work, or None if the silo is idle.
        since_s: when it became busy or idle; of an order that was queued, when the update before it came.
        forecast: predicted curve, or None before anything is known.
        failures: orders failed in a row.
        samples: processed in all its finished orders.
        overhead_s: seconds that its last order cost besides training.
        progress_steps: local steps it told of in its current order.
        queued: the order that it begins when it has trained the one in work, or None.
        queued_s: when it was given that.
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
    queued: WorkOrder | None = None
    queued_s: float = 0.0

    @property
    def busy(self) -> bool:
        return self.order is not None

    @property
    def orders(self) -> tuple[WorkOrder, ...]:
        """Those that it has not answered yet: the one in work, then the queued one."""
        return tuple(order for order in (self.order, self.queued) if order is not None)

    def order_s(self, work: LocalWork) -> float | None:
        """How long an order is predicted to take [s], with what the last one cost besides training; None if unknown."""
        if self.forecast is None:
            return None
        return work.steps * self.forecast.step_s(work.batch_size) + max(self.forecast.overhead_s, self.overhead_s)

    def begun(self, order: WorkOrder, at_s: float) -> SiloView:
        """The silo once it has been given an order, which is queued if it has one in work."""
        if self.order is not None:
            return replace(self, queued=order, queued_s=at_s)
        # Positions, here and in `ended`: a name costs 35 ns, and this is done for every order.
        return SiloView(
            self.facts, self.clock, order, at_s, self.forecast, self.failures, self.samples, self.overhead_s
        )

    def ended(self, at_s: float, samples: int, forecast: Curve | None, overhead_s: float) -> SiloView:
        """The silo once the update in work is in, with what its report changes."""
        done = self.samples + samples
        return SiloView(self.facts, self.clock + 1, self.queued, at_s, forecast, 0, done, overhead_s)

    def failed(self, at_s: float) -> SiloView:
        """The silo once the order in work has failed."""
        failures = self.failures + 1
        queueless = replace(self, queued=None, queued_s=0.0)
        return replace(queueless, order=self.queued, since_s=at_s, failures=failures, progress_steps=0)


class Index(Protocol):
    """What the coordinator knows of all silos without looking at each; read-only and live."""

    @property
    def idle(self) -> Mapping[str, int]:
        """Name -> place in the order of joining, of the silos without an order."""

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def news(self) -> int:
        """How often a silo has come, gone or ended an order."""

    def changed_since(self, news: int) -> Collection[str] | None:
        """Names of the silos that did so since ``news`` was this, perhaps twice; None if that is not known any more."""


@fast_dataclass
@dataclass(frozen=True, slots=True)
class ClusterView:
    """The whole cluster at one instant. The mappings are read-only and live: do not keep them.

    Args:
        now_s: monotonic seconds since the run began.
        version: current model version.
        silos: name -> view, in order of joining.
        pending: update id -> meta, arrived and not committed, in order of arrival.
        work: name -> what the sizing would give the silo if it were released now; worked out when first
            looked at, in O(n).
        seed: of the run, for policies that draw.
        index: of ``silos``; None has everything looked for. Whoever shows a part of the silos sets it to None.
        windows: name -> when its window ends and when its next one begins, of silos that are not always there.
    """

    now_s: float
    version: int
    silos: Mapping[str, SiloView]
    pending: Mapping[str, UpdateMeta]
    work: Mapping[str, LocalWork] = field(default_factory=dict)
    seed: int = 0
    index: Index | None = None
    windows: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def present_for_s(self, name: str) -> float | None:
        """How long a silo says that it is still there [s], 0 if it is away; None if always, or if nobody knows."""
        window = self.windows.get(name)
        if window is None or self.now_s >= window[1]:
            return None
        return max(window[0] - self.now_s, 0.0)

    def has_time(self, name: str) -> bool:
        """Whether a silo can answer one more order in its window, by what is predicted; if nothing is, it may try."""
        left_s, silo = self.present_for_s(name), self.silos[name]
        if left_s is None or (order_s := silo.order_s(self.work[name])) is None:
            return True
        waits_s = 0.0 if silo.order is None else max(silo.since_s + order_s - self.now_s, 0.0)
        return waits_s + order_s <= left_s

    @property
    def idle(self) -> tuple[str, ...]:
        """Names of the silos without an order, in order of joining; costs O(k log k) for k of them."""
        # Of many, one pass over all is cheaper than sorting.
        if self.index is None or 4 * len(self.index.idle) > len(self.silos) > 4:
            return tuple(name for name, silo in self.silos.items() if silo.order is None)
        return tuple(sorted(self.index.idle, key=self.index.idle.__getitem__))

    def idle_among(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those of ``names`` that are here and have no order, each once, in order of joining."""
        if self.index is None:
            wanted = set(names)
            return tuple(name for name in self.idle if name in wanted)
        ranks = self.index.idle
        return tuple(sorted({name for name in names if name in ranks}, key=ranks.__getitem__))

    @property
    def names(self) -> Sequence[str]:
        return tuple(self.silos) if self.index is None else self.index.names

    @property
    def news(self) -> int | None:
        """For `changed_since`, later; None without an index."""
        return None if self.index is None else self.index.news

    def changed_since(self, news: int | None) -> Collection[str] | None:
        """Names of the silos that have come, gone or ended an order since `news` was this; None if nobody knows."""
        return None if self.index is None or news is None else self.index.changed_since(news)

    @property
    def idle_count(self) -> int:
        return len(self.idle if self.index is None else self.index.idle)

    @property
    def anyone_busy(self) -> bool:
        if self.index is not None:
            return len(self.index.idle) < len(self.silos)
        return any(silo.order is not None for silo in self.silos.values())


@fast_dataclass
@dataclass(frozen=True, slots=True)
class Verdict:
    """A barrier's answer, carried out in the order of its fields.

    Args:
        rollback: go back to the remembered version, which becomes a new one.
        commit: update ids to fold into one new version; empty for none.
        discard: pending update ids to forget.
        savepoint: keep the version as it is now for a later rollback.
        release: idle silos that get a new order, from the newest version.
        queue: silos with one order in work, after `release`, that get another, to begin when they have trained that.
        carry: share of its own update, 0..1, by which a queued order begins ahead of its version; see `WorkOrder`.
        steps: local steps for released silos; absent means as many as the sizing says.
        budget_s: seconds of training for released silos; absent means no limit.
        overrun: see `WorkOrder`.
        stop_now: busy silos that are to stop after their current step.
        probe: busy silos that are to tell how far they are.
        wake_at_s: when to be asked again at the latest, or None.
        reason: why, for people.
    """

    rollback: bool = False
    commit: tuple[str, ...] = ()
    discard: tuple[str, ...] = ()
    savepoint: bool = False
    release: tuple[str, ...] = ()
    queue: tuple[str, ...] = ()
    carry: float = 0.0
    steps: Mapping[str, int] = field(default_factory=dict)
    budget_s: Mapping[str, float] = field(default_factory=dict)
    overrun: float = 1.0
    stop_now: tuple[str, ...] = ()
    probe: tuple[str, ...] = ()
    wake_at_s: float | None = None
    reason: str = ""

    def by(self, at_s: float | None) -> Verdict:
        """The same, to be asked again at ``at_s`` at the latest; None changes nothing."""
        if at_s is None or (self.wake_at_s is not None and self.wake_at_s <= at_s):
            return self
        return replace(self, wake_at_s=at_s)
