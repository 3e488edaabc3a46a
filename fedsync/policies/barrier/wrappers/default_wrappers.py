"""Barrier wrappers that FedSync adds: wait for enough silos, pause failing silos, prevent small encrypted sums."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fedsync.common.backoff import Backoff
from fedsync.core.protocols import AnyBarrier
from fedsync.core.views import ClusterView, Verdict


@dataclass(frozen=True, slots=True)
class MinimumState:
    """State of `MinimumSilos`; ``started`` once enough silos have joined."""

    started: bool
    inner: Any


@dataclass(frozen=True, slots=True)
class MinimumSilos:
    """Barrier that releases no silo before ``silos`` silos have joined, and then follows ``inner``. Without it, the
    first silo that joins would get the whole batch.
    """

    inner: AnyBarrier
    silos: int

    def init(self) -> MinimumState:
        return MinimumState(False, self.inner.init())

    def decide(self, state: MinimumState, view: ClusterView) -> tuple[MinimumState, Verdict]:
        if not state.started and len(view.silos) < self.silos:
            return state, Verdict(reason=f"{len(view.silos)} of {self.silos} silos have joined")
        inner, verdict = self.inner.decide(state.inner, view)
        return state if state.started and inner is state.inner else MinimumState(True, inner), verdict


@dataclass(frozen=True, slots=True)
class Rest:
    """Pause of a silo until ``until_s``, after ``failures`` failed orders in a row."""

    failures: int
    until_s: float


@dataclass(frozen=True, slots=True)
class RestingState:
    """State of `Resting`; ``rests`` by silo name."""

    rests: dict[str, Rest]
    inner: Any


@dataclass(frozen=True, slots=True)
class Resting:
    """Barrier that hides a silo from ``inner`` for a while after ``failures`` failed orders in a row.

    The pause is ``pause_s`` after that failure and doubles with each further failure, up to ``longest_s`` [s]. A
    successful order, or joining again, resets the count. Without a pause, every round of a synchronous barrier would
    wait for the failure of a silo with, for example, a full disk.
    """

    inner: AnyBarrier
    failures: int = 3
    pause_s: float = 10.0
    longest_s: float = 600.0

    def init(self) -> RestingState:
        return RestingState({}, self.inner.init())

    def decide(self, state: RestingState, view: ClusterView) -> tuple[RestingState, Verdict]:
        rests, begun = self._noted(state, view)
        resting = {
            name: rest for name, rest in rests.items() if rest.until_s > view.now_s and not view.silos[name].busy
        }
        visible = view
        if resting:
            silos = {name: silo for name, silo in view.silos.items() if name not in resting}
            visible = replace(view, silos=silos, index=None)
        inner, verdict = self.inner.decide(state.inner, visible)
        if begun:
            told = [_told(name, rests[name], view.silos[name].since_s) for name in begun]
            verdict = replace(verdict, reason="; ".join([*told, *([verdict.reason] if verdict.reason else [])]))
        ends = min((rest.until_s for rest in resting.values()), default=None)
        return RestingState(rests, inner), verdict.by(ends)

    def _noted(self, state: RestingState, view: ClusterView) -> tuple[dict[str, Rest], list[str]]:
        rests, begun = dict[str, Rest](), list[str]()
        for name, silo in view.silos.items():
            if silo.failures < self.failures:
                continue
            before = state.rests.get(name)
            if not silo.busy and (before is None or before.failures != silo.failures):
                pause_s = Backoff(self.pause_s, self.longest_s).pause_s(silo.failures - self.failures)
                before = Rest(silo.failures, silo.since_s + pause_s)
                begun.append(name)
            if before is not None:
                rests[name] = before
        return rests, begun


def _told(name: str, rest: Rest, since_s: float) -> str:
    return f"{name} is set aside for {rest.until_s - since_s:g} s after {rest.failures} failed orders in a row"


@dataclass(frozen=True, slots=True)
class OpenableSums:
    """Barrier ``inner`` without commits of fewer than ``least`` silos, whose encrypted sum no silo would decrypt.

    While fewer than ``least`` silos can take part, no silo is released and the run waits. An early commit is held back,
    and idle silos without an update get an order, until enough updates are in. Then ``inner`` is asked again.
    """

    inner: AnyBarrier
    least: int

    def init(self) -> Any:
        return self.inner.init()

    def decide(self, state: Any, view: ClusterView) -> tuple[Any, Verdict]:
        sent = {meta.silo for meta in view.pending.values()}
        here = len(sent.union(view.silos))
        if here < self.least:
            return state, Verdict(reason=f"a sum needs {self.least} silos, {here} can take part: the run waits")
        inner, verdict = self.inner.decide(state, view)
        committed = {view.pending[update_id].silo for update_id in verdict.commit}
        if not committed or len(committed) >= self.least:
            return inner, verdict
        missing = tuple(name for name in view.idle if name not in sent)
        if not missing and not view.anyone_busy:
            # No other silo can send, since every present silo has sent: commit all pending updates.
            return inner, replace(verdict, commit=tuple(view.pending))
        reason = f"a sum needs the updates of {self.least} silos, {len(committed)} are in"
        held = replace(verdict, rollback=False, commit=(), savepoint=False, release=missing, reason=reason)
        return state, held
