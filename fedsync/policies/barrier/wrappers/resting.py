"""Let a silo that keeps failing rest, around any barrier."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fedsync.common.backoff import Backoff
from fedsync.core.protocols import AnyBarrier
from fedsync.core.views import ClusterView, Verdict


@dataclass(frozen=True, slots=True)
class Rest:
    """A silo is set aside until ``until_s``, having failed ``failures`` orders in a row."""

    failures: int
    until_s: float


@dataclass(frozen=True, slots=True)
class RestingState:
    """``rests`` by name, of silos that have failed so often; ``news`` up to which that is known."""

    rests: dict[str, Rest]
    news: int | None
    inner: Any


@dataclass(frozen=True, slots=True)
class Resting:
    """A silo that failed ``failures`` orders in a row is not shown to ``inner`` for a while.

    It rests for ``pause_s`` after that failure, for twice as long after the next one, and so on up to ``longest_s``;
    one order that succeeds, or joining again, makes all that forgotten. Without this, a silo whose disk is full or
    whose device is lost takes an order every round, and every round of a synchronous barrier waits for it to fail.

    Args:
        inner: the barrier.
        failures: in a row, from which on a silo rests.
        pause_s: first rest [s].
        longest_s: longest rest [s].
    """

    inner: AnyBarrier
    failures: int = 3
    pause_s: float = 10.0
    longest_s: float = 600.0

    def init(self) -> RestingState:
        return RestingState({}, None, self.inner.init())

    def decide(self, state: RestingState, view: ClusterView) -> tuple[RestingState, Verdict]:
        """Ask ``inner`` about all who do not rest; O(1) for each silo that has changed while nobody does."""
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
        return RestingState(rests, view.news, inner), verdict.by(ends)

    def _noted(self, state: RestingState, view: ClusterView) -> tuple[dict[str, Rest], list[str]]:
        """Who has failed so often, and whose rest begins now."""
        changed = view.changed_since(state.news)
        rests, begun = state.rests, []
        for name in view.silos if changed is None else changed:
            silo, before = view.silos.get(name), rests.get(name)
            if silo is None or silo.failures < self.failures:
                if before is not None:
                    rests = {other: rest for other, rest in rests.items() if other != name}
            elif not silo.busy and (before is None or before.failures != silo.failures):
                pause_s = Backoff(self.pause_s, self.longest_s).pause_s(silo.failures - self.failures)
                rests = {**rests, name: Rest(silo.failures, silo.since_s + pause_s)}
                begun.append(name)
        if changed is None:
            rests = {name: rest for name, rest in rests.items() if name in view.silos}
        return rests, begun


def _told(name: str, rest: Rest, since_s: float) -> str:
    return f"{name} is set aside for {rest.until_s - since_s:g} s after {rest.failures} failed orders in a row"
