"""Round deadline that is learned from the durations of orders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from fedsync.core.views import ClusterView, Verdict
from fedsync.policies.barrier.barrier_base import Inner
from fedsync.policies.barrier.late import LateRule, LateState, Wrapper, decide_without_late, due_s, overdue
from fedsync.policies.barrier.wrappers.quorum import Required, has_quorum
from fedsync.policies.schema import NonNegative, PositiveInt, Share, register


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
    absolute deviation from the median. Unlike mean and variance, median and MAD are robust against a few very slow
    orders. Late orders count once they arrive; otherwise the deadline would learn from fast orders only and shrink for
    ever.

    No silo is late before as many orders have ended as there are silos (or ``window``, if that is less), nor before
    ``share`` of the silos have sent an update: a deadline that most silos miss is a bad deadline.
    """

    inner: Inner
    spread: NonNegative = 3.0
    """Number of median absolute deviations above the median after which an order is late; 0 makes half of the orders
    late."""

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
            wakes = [at_s for at_s in (due_s(view, inner.late, limit_s), released_s) if at_s is not None]
            verdict = verdict.by(min(wakes, default=None))
        return DeadlineState(inner, begun, durations), verdict

    def _learn(self, state: DeadlineState, view: ClusterView) -> tuple[dict[str, float], tuple[float, ...]]:
        """Return the begin times of the orders in work, and the durations with the ended orders added."""
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
