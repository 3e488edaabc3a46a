"""Bound how long any barrier waits for a silo."""

from __future__ import annotations

from dataclasses import dataclass

from fedsync.core.views import ClusterView, Verdict
from fedsync.policies.barrier.barrier_base import Inner
from fedsync.policies.barrier.late import LateRule, LateState, Wrapper, decide_without_late, due_s, overdue
from fedsync.policies.schema import Positive, register


@register("capped")
@dataclass(frozen=True, slots=True)
class Capped(Wrapper[LateState]):
    """``inner``, but no silo is waited for longer than ``cap_s`` seconds.

    Around BSP, whose silos begin together, a round ends when ``cap_s`` is over, with what is there. Around a
    barrier with a staleness bound, nobody is held for longer than that by one slow silo.

    If nobody is in when the cap is over, the first one is waited for: a cap that is too short makes rounds small,
    not endless.
    """

    inner: Inner
    cap_s: Positive
    """Seconds since a silo was sent its order after which it is late, and nobody waits for it [s]."""

    late: LateRule = LateRule.NEXT

    def init(self) -> LateState:
        return LateState(frozenset(), self.inner.init())

    def decide(self, state: LateState, view: ClusterView) -> tuple[LateState, Verdict]:
        """Strike off who is over the cap, then ask ``inner``; O(n)."""
        state, verdict = decide_without_late(
            self.inner, state, view, self.late, lambda visible: overdue(visible, self.cap_s)
        )
        released_s = view.now_s + self.cap_s if verdict.release else None
        wakes = [at_s for at_s in (due_s(view, state.late, self.cap_s), released_s) if at_s is not None]
        return state, verdict.by(min(wakes, default=None))
