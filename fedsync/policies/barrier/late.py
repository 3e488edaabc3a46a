"""Base of barriers that hide late silos from an inner barrier.

``capped``, ``quorum`` and ``deadline`` decide which orders are *late*. A late order continues, but the inner barrier
neither sees its silo nor waits for it. Its update is dropped by name, or joins the next commit like a fresh update.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fedsync.core.protocols import AnyBarrier
from fedsync.core.views import ClusterView, Verdict
from fedsync.policies.barrier.barrier_base import BarrierPolicy, check_outermost, within
from fedsync.policies.schema import Choice

S = TypeVar("S")


class LateRule(Choice):
    """Treatment of a late update: dropped, or part of the next commit."""

    DROP = "drop"
    NEXT = "next"


@dataclass(frozen=True, slots=True)
class LateState:
    """State of a wrapper; ``late`` holds the update ids of the late orders in work."""

    late: frozenset[str]
    inner: Any


class Wrapper(BarrierPolicy[S]):
    """Barrier around another barrier, for which some orders may be late."""

    __slots__ = ()
    inner: BarrierPolicy[Any]
    """Any barrier, also a wrapper."""

    late: LateRule
    """Treatment of late updates: ``drop`` discards them, ``next`` adds them to the next commit."""

    def __post_init__(self) -> None:
        inner = self.inner
        check_outermost(inner, self.kind)
        if self.late is LateRule.NEXT and isinstance(inner, Wrapper) and inner.late is LateRule.DROP:
            raise ValueError(
                f"late 'next' of {self.kind} would commit what {inner.kind} inside it drops; "
                "write the same `late` in both"
            )

    @property
    def innermost(self) -> BarrierPolicy[Any]:
        return self.inner.innermost

    @property
    def needs_forecasts(self) -> bool:
        return self.inner.needs_forecasts

    @property
    def draws(self) -> bool:
        return self.inner.draws

    def sampled(self, silos: int) -> int:
        return self.inner.sampled(silos)

    def least_updates(self, silos: int) -> int:
        return 1

    @property
    def named_silos(self) -> dict[str, int]:
        return within(self.inner)

    @property
    def mixes_rounds(self) -> bool:
        return self.late is not LateRule.DROP or self.inner.mixes_rounds


def decide_without_late(
    barrier: AnyBarrier,
    state: LateState,
    view: ClusterView,
    rule: LateRule,
    judge: Callable[[ClusterView], Collection[str]],
) -> tuple[LateState, Verdict]:
    """Ask ``barrier`` about the silos that are not late; O(n).

    If late updates are dropped, a silo is told to stop once it is late, because its further work is lost.

    Args:
        barrier: inner barrier.
        rule: treatment of late updates that have arrived.
        judge: gets the view without late silos, returns the busy silos that become late now.
    """
    dropped = tuple(update_id for update_id in view.pending if update_id in state.late) if rule is LateRule.DROP else ()
    visible = _hide(view, state.late, dropped)
    struck = tuple(judge(visible))
    late = state.late | {order.update_id for name in struck if (order := view.silos[name].order) is not None}
    if struck:
        visible = _hide(view, late, dropped)
    inner, verdict = barrier.decide(state.inner, visible)
    in_work = {silo.order.update_id for silo in view.silos.values() if silo.order is not None}
    reasons = [verdict.reason] if verdict.reason else []
    if struck:
        reasons.insert(0, f"nobody waits any longer for {', '.join(struck)}")
    if dropped:
        reasons.insert(0, f"too late: {', '.join(dropped)}")
    return LateState(late & in_work, inner), replace(
        verdict,
        discard=verdict.discard + dropped,
        stop_now=verdict.stop_now + (struck if rule is LateRule.DROP else ()),
        reason="; ".join(reasons),
    )


def overdue(view: ClusterView, patience_s: float) -> list[str]:
    """Busy silos whose orders have taken ``patience_s`` or longer, while another silo has sent an update.

    Without such an update there is nothing to commit. The condition also keeps a short patience from making all silos
    late in turn for ever: whenever a silo becomes late, the model has advanced or is about to.
    """
    return [
        name
        for name, silo in view.silos.items()
        if silo.order is not None
        and view.now_s >= silo.since_s + patience_s
        and (view.pending or silo.order.base_version < view.version)
    ]


def due_s(view: ClusterView, late: Collection[str], patience_s: float) -> float | None:
    """Next time at which an order that is not late will have taken ``patience_s``, or None."""
    times = (
        silo.since_s + patience_s
        for silo in view.silos.values()
        if silo.order is not None and silo.order.update_id not in late
    )
    return min((at_s for at_s in times if at_s > view.now_s), default=None)


def _hide(view: ClusterView, late: Collection[str], dropped: Collection[str]) -> ClusterView:
    """Return the view without the silos of late orders and without dropped updates; idle silos always stay."""
    if not late:
        return view
    silos = {name: silo for name, silo in view.silos.items() if silo.order is None or silo.order.update_id not in late}
    pending = {update_id: meta for update_id, meta in view.pending.items() if update_id not in dropped}
    return replace(view, silos=silos, pending=pending, index=None)
