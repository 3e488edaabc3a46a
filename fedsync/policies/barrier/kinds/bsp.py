"""Bulk synchronous parallel."""

from __future__ import annotations

from dataclasses import dataclass

from fedsync.core.views import ClusterView, Verdict
from fedsync.policies.barrier.barrier_base import BarrierPolicy
from fedsync.policies.schema import register

WAIT = Verdict(reason="waiting for the silos still at work")


@register("bsp")
@dataclass(frozen=True, slots=True)
class Bsp(BarrierPolicy[None]):
    """Barrier that waits for all silos and then releases all together.

    A silo that failed its order skips the round and joins the next.

    Source: the baseline of all the papers, for example LB-BSP, section 2.1.
    """

    complete: bool = False
    """Whether each round includes every present silo: a silo that failed its order, or has just joined, gets an order
    before the round ends. A silo that fails three times in a row is set aside, and the round does not wait for it."""

    lockstep = True
    rounds = True
    most_ahead = 0
    mixes_rounds = False
    needs_forecasts = False

    def init(self) -> None: ...

    def decide(self, state: None, view: ClusterView) -> tuple[None, Verdict]:
        if view.anyone_busy:
            return None, WAIT
        if not view.silos:
            return None, Verdict(reason="no silo is here")
        if not view.pending:
            return None, Verdict(release=view.idle, reason=f"nothing in work: {len(view.silos)} silos begin")
        sent = {meta.silo for meta in view.pending.values()} if self.complete else set(view.silos)
        missing = tuple(name for name in view.idle if name not in sent)
        if missing:
            return None, Verdict(release=missing, reason=f"{len(missing)} silos are missing in this round")
        reason = f"all {len(view.pending)} updates are in"
        return None, Verdict(commit=tuple(view.pending), release=view.idle, reason=reason)
