"""Aggressive synchronisation (A-BSP): the first finisher stops the other silos."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fedsync.core.views import ClusterView, Verdict
from fedsync.policies.barrier.barrier_base import BarrierPolicy
from fedsync.policies.schema import PartOfOne, Positive, register


@dataclass(frozen=True, slots=True)
class AbspState:
    """State of `Absp`; ``planned`` holds the samples per order of the superstep, by silo."""

    planned: Mapping[str, int] = field(default_factory=dict)
    asked_s: float = float("-inf")
    halted: bool = False


@register("a-bsp")
@dataclass(frozen=True, slots=True)
class Absp(BarrierPolicy[AbspState]):
    """Barrier that stops all silos once the first has finished and ``sync_ratio`` of all samples are processed.

    All silos get the same order. From the first update on, the barrier computes the processed share of the superstep's
    samples, from the updates and from the progress that busy silos report. At a share of R_s or more, it tells the busy
    silos to stop after their current step. Below R_s, it asks for their progress every ``report_s``. Updates count as
    progress, so a driver that cannot reach busy silos runs plain BSP. R_s = 1 is BSP; R_s = 0 stops all silos at the
    first finisher.

    Samples that a silo did not process come first in its next order (section 3.3.1); the sampler does this. The share
    of a failed or lost silo leaves the superstep. A silo that joins waits for the next superstep.

    Source: A-BSP, section 3.2.1, Algorithm 1. In the paper, tasks report continuously. Here no silo is asked before
    the first has finished, because nothing depends on its progress until then.
    """

    sync_ratio: PartOfOne = 0.5
    """Share of the round's samples that must be processed before the others stop; R_s in the paper. 1 is ``bsp``."""

    report_s: Positive = 1.0
    """Seconds between two progress requests to the busy silos [s]."""

    rounds = True
    most_ahead = 0
    unequal_steps = True
    mixes_rounds = False

    @property
    def needs_progress(self) -> float:
        return self.report_s

    def init(self) -> AbspState:
        return AbspState()

    def decide(self, state: AbspState, view: ClusterView) -> tuple[AbspState, Verdict]:
        busy = [name for name, silo in view.silos.items() if silo.order is not None]
        if not busy:
            planned, verdict = begin(view)
            return AbspState(planned), verdict
        if not view.pending or state.halted:
            return state, Verdict(reason=f"waiting for {len(busy)} silos")
        ratio = self._processed(state.planned, busy, view)
        if ratio >= self.sync_ratio:
            reason = f"the first is in and {ratio:.0%} of the samples are done: {len(busy)} silos stop"
            return replace(state, halted=True), Verdict(stop_now=tuple(busy), reason=reason)
        again_s = state.asked_s + self.report_s
        reason = f"{ratio:.0%} of the samples are known to be done"
        if view.now_s < again_s:
            return state, Verdict(wake_at_s=again_s, reason=reason)
        return replace(state, asked_s=view.now_s), Verdict(
            probe=tuple(busy), wake_at_s=view.now_s + self.report_s, reason=f"{reason}: asking {len(busy)} silos"
        )

    @staticmethod
    def _processed(planned: Mapping[str, int], busy: list[str], view: ClusterView) -> float:
        """R_p: processed samples / planned samples, both over the silos with an update or an order in work."""
        done = sum(meta.samples for meta in view.pending.values())
        total = sum(planned.get(meta.silo, meta.samples) for meta in view.pending.values())
        for name in busy:
            order = view.silos[name].order
            if order is not None:
                done += view.silos[name].progress_steps * order.batch_size
                total += order.planned_samples
        return done / total


def begin(view: ClusterView) -> tuple[dict[str, int], Verdict]:
    """Begin a superstep once no silo is busy; return the samples per order, by silo, and the verdict. O(n)."""
    planned = {name: view.work[name].steps * view.work[name].batch_size for name in view.silos}
    commit = tuple(view.pending) if view.silos else ()
    reason = f"all {len(commit)} updates are in" if commit else f"{len(planned)} silos begin"
    return planned, Verdict(commit=commit, release=tuple(view.silos), reason=reason)
