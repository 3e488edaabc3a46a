"""Barriers that hide late silos from an inner barrier: ``capped``, ``quorum``, ``deadline``, and their base class.

These barriers decide which orders (training requests) are *late*. A late order continues, but the inner barrier ignores
its silo. The order's update is discarded, or joins the next commit like a fresh update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, TypeVar

from fedsync.core.protocols import AnyBarrier
from fedsync.core.views import ClusterView, Verdict
from fedsync.policies.barrier.barrier_base import BarrierPolicy, Inner, within
from fedsync.policies.schema import Choice, NonNegative, Positive, PositiveInt, Share, register

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

    inner: BarrierPolicy[Any]
    """Any barrier, also a wrapper."""

    late: LateRule
    """Treatment of late updates: ``drop`` discards them, ``next`` adds them to the next commit."""

    def __post_init__(self) -> None:
        inner = self.inner
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
    """Ask ``barrier`` about the silos that are not late; ``judge`` returns the busy silos that become late now. O(n).
    If late updates are dropped, a late silo is told to stop, because its further work is lost.
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
    times = (
        silo.since_s + patience_s
        for silo in view.silos.values()
        if silo.order is not None and silo.order.update_id not in late
    )
    return min((at_s for at_s in times if at_s > view.now_s), default=None)


def _hide(view: ClusterView, late: Collection[str], dropped: Collection[str]) -> ClusterView:
    if not late:
        return view
    silos = {name: silo for name, silo in view.silos.items() if silo.order is None or silo.order.update_id not in late}
    pending = {update_id: meta for update_id, meta in view.pending.items() if update_id not in dropped}
    return replace(view, silos=silos, pending=pending, index=None)


@register("capped")
@dataclass(frozen=True, slots=True)
class Capped(Wrapper[LateState]):
    """Barrier ``inner`` with a limit of ``cap_s`` seconds on the wait for a silo.

    Around BSP, whose silos begin together, a round ends after ``cap_s`` with the updates that are in. If none is in,
    the barrier waits for the first. Around a barrier with a staleness bound, one slow silo holds the others for
    ``cap_s`` at most.
    """

    inner: Inner
    cap_s: Positive
    """Seconds after which the order of a silo is late, and no silo waits for it any longer [s]."""

    late: LateRule = LateRule.NEXT

    def init(self) -> LateState:
        return LateState(frozenset(), self.inner.init())

    def decide(self, state: LateState, view: ClusterView) -> tuple[LateState, Verdict]:
        state, verdict = decide_without_late(
            self.inner, state, view, self.late, lambda visible: overdue(visible, self.cap_s)
        )
        released_s = view.now_s + self.cap_s if verdict.release else None
        return state, verdict.by(due_s(view, state.late, self.cap_s)).by(released_s)


@dataclass(frozen=True, slots=True)
class Required:
    """Number of silos that make a quorum: ``count``, or all if fewer take part; else ``share`` of them, rounded up."""

    count: int | None = None
    share: float = 1.0

    def of(self, silos: int) -> int:
        if self.count is not None:
            return max(min(self.count, silos), 1)
        # 0.6 x 5 may give 3.0000000000000004, which must not round up to 4.
        return max(math.ceil(self.share * silos - 1e-9), 1)


def has_quorum(view: ClusterView, required: Required) -> bool:
    sent = {meta.silo for meta in view.pending.values()}
    part = sent.union(name for name, silo in view.silos.items() if silo.order is not None)
    return len(sent) >= required.of(len(part))


@register("quorum")
@dataclass(frozen=True, slots=True)
class Quorum(Wrapper[LateState]):
    """Barrier ``inner`` that needs only ``count`` silos, or a ``share`` of the participating silos.

    Once the quorum has sent updates, the silos still busy are late. A BSP round with more silos than the quorum is
    over-selection: the slowest silos do not delay the round, and with ``late: drop`` their updates are discarded.

    Source: over-selection as in Bonawitz et al. 2019, "Towards federated learning at scale", arXiv:1902.01046.
    """

    inner: Inner
    count: PositiveInt | None = None
    """Number of silos that make a quorum. Write either ``count`` or ``share``."""

    share: Share | None = None
    """Share of the round's silos that makes a quorum, rounded up. Write either ``share`` or ``count``."""

    late: LateRule = LateRule.NEXT

    def __post_init__(self) -> None:
        if (self.count is None) == (self.share is None):
            raise ValueError("the number of silos is not defined; write either `count` or `share`")
        Wrapper.__post_init__(self)

    @property
    def named_silos(self) -> dict[str, int]:
        return {"count": self.count or 1, **within(self.inner)}

    def least_updates(self, silos: int) -> int:
        return Required(self.count, self.share or 1.0).of(self.sampled(silos))

    def init(self) -> LateState:
        return LateState(frozenset(), self.inner.init())

    def decide(self, state: LateState, view: ClusterView) -> tuple[LateState, Verdict]:
        return decide_without_late(self.inner, state, view, self.late, self._judge)

    def _judge(self, visible: ClusterView) -> list[str]:
        if not has_quorum(visible, Required(self.count, self.share or 1.0)):
            return []
        return [name for name, silo in visible.silos.items() if silo.order is not None]


@dataclass(frozen=True, slots=True)
class DeadlineState:
    """State of `Deadline`; ``begun`` holds the begin of each order in work, ``durations`` those of ended orders."""

    inner: LateState
    begun: Mapping[str, float] = field(default_factory=dict)
    durations: tuple[float, ...] = ()


@register("deadline")
@dataclass(frozen=True, slots=True)
class Deadline(Wrapper[DeadlineState]):
    """Barrier ``inner`` without waiting for orders that take much longer than usual.

    The limit is ``median + spread * MAD`` over the last ``window`` orders of all silos [s], where MAD is the median
    absolute deviation from the median. Median and MAD are robust against a few very slow orders. Late orders count once
    they arrive; otherwise the deadline would learn from fast orders only and shrink for ever.

    No silo is late before as many orders have ended as there are silos (or ``window``, if that is less), nor before
    ``share`` of the silos have sent an update: otherwise a short deadline could exclude most silos.
    """

    inner: Inner
    spread: NonNegative = 3.0
    """Median absolute deviations above the median after which an order is late; 0 makes half of the orders late."""

    floor_s: NonNegative = 0.0
    """Shortest deadline [s]."""

    share: Share = 0.5
    """Share of the silos whose updates must be in before any silo is late."""

    window: PositiveInt = 100
    """Number of newest orders from which the deadline is computed."""

    late: LateRule = LateRule.NEXT

    def least_updates(self, silos: int) -> int:
        return Required(share=self.share).of(self.sampled(silos))

    def init(self) -> DeadlineState:
        return DeadlineState(LateState(frozenset(), self.inner.init()))

    def decide(self, state: DeadlineState, view: ClusterView) -> tuple[DeadlineState, Verdict]:
        begun, durations = self._learn(state, view)
        limit_s = self._limit_s(durations, len(view.silos))

        def judge(visible: ClusterView) -> list[str]:
            if limit_s is None or not has_quorum(visible, Required(share=self.share)):
                return []
            return overdue(visible, limit_s)

        inner, verdict = decide_without_late(self.inner, state.inner, view, self.late, judge)
        begun = {**begun, **dict.fromkeys(verdict.release, view.now_s)}
        if limit_s is not None:
            released_s = view.now_s + limit_s if verdict.release else None
            verdict = verdict.by(due_s(view, inner.late, limit_s)).by(released_s)
        return DeadlineState(inner, begun, durations), verdict

    def _learn(self, state: DeadlineState, view: ClusterView) -> tuple[dict[str, float], tuple[float, ...]]:
        begun: dict[str, float] = {}
        ended: list[float] = []
        sent = {meta.silo for meta in view.pending.values()}
        for name, begun_s in state.begun.items():
            silo = view.silos.get(name)
            if silo is None:
                continue
            if silo.order is not None:
                begun[name] = begun_s
            elif name in sent:
                ended.append(silo.since_s - begun_s)
        return begun, (*state.durations, *ended)[-self.window :]

    def _limit_s(self, durations: tuple[float, ...], silos: int) -> float | None:
        if len(durations) < max(min(silos, self.window), 1):
            return None
        usual = median(durations)
        spread = median(abs(duration - usual) for duration in durations)
        return max(usual + self.spread * spread, self.floor_s)
