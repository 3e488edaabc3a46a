"""What policies see, and what a barrier answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fedsync.core.curve import Curve
from fedsync.core.orders import SiloFacts, UpdateMeta, WorkOrder

if TYPE_CHECKING:
    from fedsync.core.sizing import LocalWork


@dataclass(frozen=True, slots=True)
class SiloView:
    """One silo as policies see it.

    Args:
        facts: what the silo said when it joined.
        clock: orders it has finished with an update.
        order: the order in work, or None if the silo is idle.
        since_s: when it became busy or idle.
        forecast: predicted curve, or None before anything is known.
        failures: orders failed in a row.
        samples: processed in all its finished orders.
        overhead_s: seconds that its last order cost besides training.
        progress_steps: local steps it told of in its current order.
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
        """Whether an order is in work."""
        return self.order is not None


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
        idle_ranks: name -> place in the order of joining, of the silos without an order; None has them looked for.
    """

    now_s: float
    version: int
    silos: Mapping[str, SiloView]
    pending: Mapping[str, UpdateMeta]
    work: Mapping[str, LocalWork] = field(default_factory=dict)
    seed: int = 0
    idle_ranks: Mapping[str, int] | None = None

    @property
    def idle(self) -> tuple[str, ...]:
        """Names of the silos without an order, in order of joining; costs O(k log k) for k of them."""
        ranks = self.idle_ranks
        # Of many, one pass over all is cheaper than sorting.
        if ranks is None or 4 * len(ranks) > len(self.silos) > 4:
            return tuple(name for name, silo in self.silos.items() if silo.order is None)
        return tuple(sorted(ranks, key=ranks.__getitem__))

    @property
    def anyone_busy(self) -> bool:
        """Whether any silo has an order in work."""
        if self.idle_ranks is not None:
            return len(self.idle_ranks) < len(self.silos)
        return any(silo.order is not None for silo in self.silos.values())


@dataclass(frozen=True, slots=True)
class Verdict:
    """A barrier's answer, carried out in the order of its fields.

    Args:
        rollback: go back to the remembered version, which becomes a new one.
        commit: update ids to fold into one new version; empty for none.
        discard: pending update ids to forget.
        remember: keep the version as it is now for a later rollback.
        release: idle silos that get a new order, from the newest version.
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
    remember: bool = False
    release: tuple[str, ...] = ()
    steps: Mapping[str, int] = field(default_factory=dict)
    budget_s: Mapping[str, float] = field(default_factory=dict)
    overrun: float = 1.0
    stop_now: tuple[str, ...] = ()
    probe: tuple[str, ...] = ()
    wake_at_s: float | None = None
    reason: str = ""
