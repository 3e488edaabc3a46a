"""Aggressive synchronisation: when the first silo has finished, the others stop where they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fedsync.core.views import ClusterView, Verdict
from fedsync.policies.barrier.barrier_base import BarrierPolicy
from fedsync.policies.schema import PartOfOne, Positive, register


@dataclass(frozen=True, slots=True)
class AbspState:
    """Of `Absp`.

    Args:
        planned: samples of each order of the superstep, by silo.
        asked_s: when the silos at work were last asked how far they are; minus infinity before.
        halted: whether they were told to stop.
    """

    planned: Mapping[str, int] = field(default_factory=dict)
    asked_s: float = float("-inf")
    halted: bool = False


@register("a-bsp")
@dataclass(frozen=True, slots=True)
class Absp(BarrierPolicy[AbspState]):
    """Stop everybody once the first has finished and ``sync_ratio`` of all samples are processed.

    All silos get the same order. When the first is in, the share of the superstep's samples that are
    processed, those of the updates and those that the others tell of, is compared with R_s: at or above it,
    the others are told to stop after their current step; below, they are asked how far they are, again
    every ``report_s``. A silo's own update tells too, so a driver that cannot reach busy silos runs plain
    BSP. R_s = 1 is BSP, and R_s = 0 stops everybody at the first finisher.

    What a silo had no time for comes first in its next order (section 3.3.1): that is the sampler's doing.
    A silo that failed or was lost leaves the superstep with its share; one that joins waits for the next.

    Source: A-BSP, section 3.2.1, Algorithm 1. There tasks report all the time; here nobody is asked before
    the first has finished, since nothing depends on it.
    """

    sync_ratio: PartOfOne = 0.5
    """Share of all samples of the round that have to be processed; R_s in the paper. 1 is ``bsp``."""

    report_s: Positive = 1.0
    """Seconds between two questions how far silos are [s]."""

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
        """Commit and release all when all are in; otherwise see whether that may be hurried; O(n)."""
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
        """R_p: samples done of samples planned, both over the silos with an update or at work."""
        done = sum(meta.samples for meta in view.pending.values())
        total = sum(planned.get(meta.silo, meta.samples) for meta in view.pending.values())
        for name in busy:
            order = view.silos[name].order
            if order is not None:
                done += view.silos[name].progress_steps * order.batch_size
                total += order.planned_samples
        return done / total


def begin(view: ClusterView) -> tuple[dict[str, int], Verdict]:
    """The next superstep of a barrier that commits and releases all when nobody is at work; O(n).

    Returns:
        Samples of each order, by silo, and the verdict.
    """
    planned = {name: view.work[name].steps * view.work[name].batch_size for name in view.silos}
    commit = tuple(view.pending) if view.silos else ()
    reason = f"all {len(commit)} updates are in" if commit else f"{len(planned)} silos begin"
    return planned, Verdict(commit=commit, release=tuple(view.silos), reason=reason)
