"""Barriers with rounds of all silos: bulk synchronous parallel (BSP), its aggressive variant, and timed rounds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fedsync.core.views import ClusterView, SiloView, Verdict
from fedsync.policies.barrier.barrier_base import BarrierPolicy
from fedsync.policies.schema import NonNegative, PartOfOne, Positive, register

WAIT = Verdict(reason="waiting for the silos still at work")


@register("bsp")
@dataclass(frozen=True, slots=True)
class Bsp(BarrierPolicy[None]):
    """Barrier that waits for all silos and then releases all together.

    A silo that failed its order skips the round and joins the next. Source: for example LB-BSP, section 2.1.
    """

    complete: bool = False
    """Whether each round includes every present silo: a silo that failed its order, or has just joined, gets an order
    before the round ends. A silo that fails three times in a row is set aside, and the round does not wait for it."""

    lockstep = True
    waits_for_all = True
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
    silos to stop after their current step. Below R_s, it asks for their progress every ``report_s``. If the driver
    cannot reach busy silos, this is plain BSP, as for R_s = 1. R_s = 0 stops all silos at the first finisher.

    Samples that a silo did not process come first in its next order (section 3.3.1); the sampler does this. The share
    of a failed or lost silo leaves the superstep. A silo that joins waits for the next superstep.

    Source: A-BSP, section 3.2.1, Algorithm 1. In the paper, tasks report continuously. Here no silo is asked before the
    first has finished, because nothing depends on its progress until then.
    """

    sync_ratio: PartOfOne = 0.5
    """Share of the round's samples that must be processed before the others stop; R_s in the paper. 1 is ``bsp``."""

    report_s: Positive = 1.0
    """Seconds between two progress requests to the busy silos [s]."""

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
        done = sum(meta.samples for meta in view.pending.values())
        total = sum(planned.get(meta.silo, meta.samples) for meta in view.pending.values())
        for name in busy:
            order = view.silos[name].order
            if order is not None:
                done += view.silos[name].progress_steps * order.batch_size
                total += order.planned_samples
        return done / total


def begin(view: ClusterView) -> tuple[dict[str, int], Verdict]:
    planned = {name: view.work[name].steps * view.work[name].batch_size for name in view.silos}
    commit = tuple(view.pending) if view.silos else ()
    reason = f"all {len(commit)} updates are in" if commit else f"{len(planned)} silos begin"
    return planned, Verdict(commit=commit, release=tuple(view.silos), reason=reason)


@dataclass(frozen=True, slots=True)
class OnTimeState:
    """State of `OnTime`: ``planned`` samples per order, ``heard`` (last reported steps, report time), by silo."""

    planned: Mapping[str, int] = field(default_factory=dict)
    begun_s: float = 0.0
    asked_s: float = float("-inf")
    heard: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    halted: bool = False


@register("on-time")
@dataclass(frozen=True, slots=True)
class OnTime(BarrierPolicy[OnTimeState]):
    """Barrier that waits for all silos, but no longer than a round with the right batch sizes would take.

    A balancer can be wrong: in the first round no speeds are known, and later other jobs may use a machine. So this
    barrier measures the speed v_i of each silo in the current round: from the duration of its training if its update is
    in, else from its reported progress or its forecast. If all n samples of the round were shared in proportion to
    speed, training would take T = n / sum_i v_i seconds, and the round T + o, where o is the largest overhead of a busy
    silo.
    - If all silos will finish training within T + ``slack`` (T + o), the barrier waits for all silos, until o later.
    - Otherwise the barrier tells all busy silos to stop after their current step: half a step of the slowest silo
      before T, or at once if this time has passed. Unprocessed samples come first in their next orders.

    The barrier asks for progress once the first update is in and a silo will be late, a speed is unknown, or half of
    ``slack`` has passed. It asks again every ``report_s`` and stops no silo before the first request. Where all silos
    finish nearly together, this is BSP without requests. A silo without a reported step or a forecast counts as
    standing still, which makes T later. A driver that cannot reach busy silos runs plain BSP.

    `Absp` stops silos even where sizes are right, so its rounds are shorter and hold fewer samples.
    """

    slack: NonNegative = 0.1
    """Share of the right round time by which a round may be longer before silos are stopped."""

    report_s: Positive = 1.0
    """Seconds between two progress requests to the busy silos [s]."""

    unequal_steps = True
    waits_for_all = True
    mixes_rounds = False
    most_ahead = 0

    @property
    def needs_progress(self) -> float:
        return self.report_s

    def init(self) -> OnTimeState:
        return OnTimeState()

    def decide(self, state: OnTimeState, view: ClusterView) -> tuple[OnTimeState, Verdict]:
        busy = {name: silo.order for name, silo in view.silos.items() if silo.order is not None}
        if not busy:
            planned, verdict = begin(view)
            return OnTimeState(planned, view.now_s), verdict
        waiting = f"waiting for {len(busy)} silos"
        # A silo cannot be stopped during its last step.
        late = tuple(name for name, order in busy.items() if view.silos[name].progress_steps < order.max_steps - 1)
        if not view.pending or not late or state.halted:
            return state, Verdict(reason=waiting)
        state = self._listen(state, view)
        ask_s, due_s = self._times(state, view)
        ask_s = max(ask_s, state.asked_s + self.report_s)
        if view.now_s >= due_s and math.isfinite(state.asked_s):
            reason = f"with sizes by speed the round would be over: {len(late)} silos stop"
            return replace(state, halted=True), Verdict(stop_now=late, reason=reason)
        if view.now_s < ask_s:
            return state, Verdict(wake_at_s=min(due_s, ask_s), reason=waiting)
        # After the due time, ask for progress once before stopping silos.
        again_s = view.now_s + self.report_s
        wake_s = due_s if view.now_s < due_s < again_s else again_s
        reason = f"{waiting}, which are asked how far they are"
        return replace(state, asked_s=view.now_s), Verdict(probe=late, wake_at_s=wake_s, reason=reason)

    @staticmethod
    def _listen(state: OnTimeState, view: ClusterView) -> OnTimeState:
        if view.now_s <= state.begun_s:
            return state
        told = {name: silo.progress_steps for name, silo in view.silos.items() if silo.progress_steps > 0}
        news = {name: (steps, view.now_s) for name, steps in told.items() if state.heard.get(name, (0,))[0] != steps}
        return replace(state, heard={**state.heard, **news}) if news else state

    def _times(self, state: OnTimeState, view: ClusterView) -> tuple[float, float]:
        total, speeds = 0, list[float]()
        for meta in view.pending.values():
            silo = view.silos.get(meta.silo)
            # A surrounding barrier may let late updates of another round pass; skip them.
            if silo is not None and meta.base_version == view.version:
                total += state.planned.get(meta.silo, meta.samples)
                seconds = silo.since_s - state.begun_s - silo.overhead_s
                speeds.append(meta.samples / seconds if seconds > 0 else 0.0)
        last_s, step_s, overhead_s = 0.0, 0.0, 0.0
        for name, silo in view.silos.items():
            if silo.order is not None:
                total += silo.order.planned_samples
                speeds.append(speed := self._speed(state, name, silo))
                last_s = max(last_s, silo.order.planned_samples / speed if speed > 0 else math.inf)
                step_s = max(step_s, silo.order.batch_size / speed if speed > 0 else 0.0)
                overhead_s = max(overhead_s, silo.overhead_s)
        speed = sum(speeds)
        right_s = total / speed if speed > 0 else math.inf
        slack_s = self.slack * (right_s + overhead_s)
        if last_s <= right_s + slack_s < math.inf:
            # Forecasts hold. Any part of the overhead can lie before the training.
            right_s += overhead_s
            return state.begun_s + right_s + slack_s / 2, state.begun_s + right_s + slack_s
        # Silos stop at the end of their current step, on average half a step later.
        return state.begun_s, state.begun_s + right_s - step_s / 2

    @staticmethod
    def _speed(state: OnTimeState, name: str, silo: SiloView) -> float:
        assert silo.order is not None
        batch_size, forecast = silo.order.batch_size, silo.forecast
        usual = 0.0 if forecast is None else batch_size / forecast.step_s(batch_size)
        if name not in state.heard:
            return usual
        steps, at_s = state.heard[name]
        # On average the silo is half through its current step. Any part of the overhead can lie before its first step.
        samples, elapsed_s = (steps + 0.5) * batch_size, at_s - state.begun_s
        trained_s = elapsed_s - silo.overhead_s
        fastest = samples / trained_s if trained_s > 0 else math.inf
        return min(max(samples / elapsed_s, usual), fastest)
