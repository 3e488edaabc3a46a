"""Rounds that end when they would, had all sizes been right: nobody waits for a silo of which too little was known."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fedsync.core.orders import WorkOrder
from fedsync.core.speed.curve import Curve
from fedsync.core.views import ClusterView, Verdict
from fedsync.policies.barrier.barrier_base import BarrierPolicy
from fedsync.policies.barrier.kinds.absp import begin
from fedsync.policies.schema import NonNegative, Positive, register


@dataclass(frozen=True, slots=True)
class OnTimeState:
    """Of `OnTime`.

    Args:
        planned: samples of each order of the round, by silo.
        begun_s: when the round began.
        asked_s: when the silos at work were last asked how far they are; minus infinity before.
        heard: steps that a silo at work told of last, and when, by silo.
        halted: whether they were told to stop.
    """

    planned: Mapping[str, int] = field(default_factory=dict)
    begun_s: float = 0.0
    asked_s: float = float("-inf")
    heard: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    halted: bool = False


@register("on-time")
@dataclass(frozen=True, slots=True)
class OnTime(BarrierPolicy[OnTimeState]):
    """Wait for everybody, but no longer than a round of the right sizes would have taken.

    A balancer can be wrong: in the first round nothing is known of the machines, and later others may use one of
    them. What counts is the speed v_i of each silo in this round: if it is in, by what its training took; if it is
    at work, by how far it says it is, or by its forecast. All n samples of the round, shared in proportion to speed,
    would have taken T = n / sum_i v_i seconds of training.

    - If nobody will take more than ``slack`` longer than T, all are waited for until then.
    - Else all who are still at work are told to stop after the step that they are in at T, or at once if it has
      passed. What they had no time for comes first in their next orders.

    Silos are asked how far they are once the first is in and somebody will be late, or nothing is known of it, or half
    of ``slack`` is over; again every ``report_s``. Nobody is stopped before. Where all finish together, or nearly,
    this is BSP, and nobody is asked. The right sizes follow for the next round, for who stopped early has shown its
    speed. A silo that tells of no step, and has no forecast, counts as standing still: then T comes out later. A driver
    that cannot reach busy silos runs plain BSP.

    Not to be confused with `Absp`, which stops everybody at the first finisher once a fixed share is processed, also
    where sizes are right, so its rounds get shorter and hold less; and not with ``capped`` and ``deadline``, whose
    late silos go on, for nothing or for the next commit.
    """

    slack: NonNegative = 0.1
    """By what share of the right time a round may be longer before silos are stopped."""

    report_s: Positive = 1.0
    """Seconds between two questions how far silos are [s]."""

    unequal_steps = True
    mixes_rounds = False
    most_ahead = 0

    @property
    def needs_progress(self) -> float:
        return self.report_s

    def init(self) -> OnTimeState:
        return OnTimeState()

    def decide(self, state: OnTimeState, view: ClusterView) -> tuple[OnTimeState, Verdict]:
        """Commit and release all when all are in; otherwise see whether that takes too long; O(n)."""
        busy = {name: silo.order for name, silo in view.silos.items() if silo.order is not None}
        if not busy:
            planned, verdict = begin(view)
            return OnTimeState(planned, view.now_s), verdict
        waiting = f"waiting for {len(busy)} silos"
        # In its last step nobody can be stopped.
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
        # If the time is over already, answers come first.
        again_s = view.now_s + self.report_s
        wake_s = due_s if view.now_s < due_s < again_s else again_s
        reason = f"{waiting}, which are asked how far they are"
        return replace(state, asked_s=view.now_s), Verdict(probe=late, wake_at_s=wake_s, reason=reason)

    @staticmethod
    def _listen(state: OnTimeState, view: ClusterView) -> OnTimeState:
        """With what silos have told of since."""
        if view.now_s <= state.begun_s:
            return state
        told = {name: silo.progress_steps for name, silo in view.silos.items() if silo.progress_steps > 0}
        news = {name: (steps, view.now_s) for name, steps in told.items() if state.heard.get(name, (0,))[0] != steps}
        return replace(state, heard={**state.heard, **news}) if news else state

    def _times(self, state: OnTimeState, view: ClusterView) -> tuple[float, float]:
        """When who is at work is to say how far it is, and when it is to stop [s]."""
        total, speeds = 0, list[float]()
        for meta in view.pending.values():
            silo = view.silos.get(meta.silo)
            # One of another round came late, and a barrier around this one has let it.
            if silo is not None and meta.base_version == view.version:
                total += state.planned.get(meta.silo, meta.samples)
                seconds = silo.since_s - state.begun_s - silo.overhead_s
                speeds.append(meta.samples / seconds if seconds > 0 else 0.0)
        last_s, step_s = 0.0, 0.0
        for name, silo in view.silos.items():
            if silo.order is not None:
                total += silo.order.planned_samples
                speeds.append(speed := self._speed(state, name, silo.order, silo.forecast))
                last_s = max(last_s, silo.order.planned_samples / speed if speed > 0 else math.inf)
                step_s = max(step_s, silo.order.batch_size / speed if speed > 0 else 0.0)
        speed = sum(speeds)
        right_s = total / speed if speed > 0 else math.inf
        if last_s <= (1 + self.slack) * right_s < math.inf:
            return state.begun_s + (1 + self.slack / 2) * right_s, state.begun_s + (1 + self.slack) * right_s
        # Silos stop after the step that they are in: half a step later, in the mean.
        return state.begun_s, state.begun_s + right_s - step_s / 2

    @staticmethod
    def _speed(state: OnTimeState, name: str, order: WorkOrder, forecast: Curve | None) -> float:
        """Of a silo at work, in this round [samples/s]; 0 if nothing is known."""
        if name in state.heard:
            steps, at_s = state.heard[name]
            # It is half through the step that it is in, in the mean.
            return (steps + 0.5) * order.batch_size / (at_s - state.begun_s)
        return 0.0 if forecast is None else order.batch_size / forecast.step_s(order.batch_size)
