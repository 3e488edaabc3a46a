"""Bulk synchronous parallel."""

from __future__ import annotations

from dataclasses import dataclass

from fedsync.core.views import ClusterView, Verdict
from fedsync.policies.barrier.barrier_base import BarrierPolicy
from fedsync.policies.schema import register

WAIT = Verdict(reason="waiting for the silos still at work")
"""The answer to all arrivals of a round but the last."""


@register("bsp")
@dataclass(frozen=True, slots=True)
class Bsp(BarrierPolicy[None]):
    """Wait for everybody, then go on together.

    A silo that failed its order is not waited for: it sits the round out and goes on with the others.

    Source: the baseline of all the papers, for example LB-BSP, section 2.1.
    """

    complete: bool = False
    """A silo that failed its order, or has just come, gets one before the round ends: all that are there are in each
    round. One that fails three times in a row is set aside, and not waited for."""

    lockstep = True
    rounds = True
    most_ahead = 0
    mixes_rounds = False
    needs_forecasts = False

    def init(self) -> None: ...

    def decide(self, state: None, view: ClusterView) -> tuple[None, Verdict]:
        """Commit and release all as soon as nobody is busy."""
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
