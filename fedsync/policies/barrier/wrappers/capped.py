"""Upper bound on the time that any barrier waits for a silo."""

from __future__ import annotations

from dataclasses import dataclass

from fedsync.core.views import ClusterView, Verdict
from fedsync.policies.barrier.barrier_base import Inner
from fedsync.policies.barrier.late import LateRule, LateState, Wrapper, decide_without_late, due_s, overdue
from fedsync.policies.schema import Positive, register


@register("capped")
@dataclass(frozen=True, slots=True)
class Capped(Wrapper[LateState]):
    """Barrier ``inner`` with a limit of ``cap_s`` seconds on the wait for a silo.

    Around BSP, whose silos begin together, a round ends after ``cap_s`` with the updates that are in. Around a barrier
    with a staleness bound, one slow silo holds the others for at most ``cap_s``.

    If no update is in after ``cap_s``, the barrier waits for the first: a short cap makes rounds small, not endless.
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
        wakes = [at_s for at_s in (due_s(view, state.late, self.cap_s), released_s) if at_s is not None]
        return state, verdict.by(min(wakes, default=None))
