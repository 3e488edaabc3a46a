"""Wrapper that holds any barrier back until enough silos have joined."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedsync.core.protocols import AnyBarrier
from fedsync.core.views import ClusterView, Verdict


@dataclass(frozen=True, slots=True)
class MinimumState:
    """State of `MinimumSilos`; ``started`` once enough silos have joined."""

    started: bool
    inner: Any


@dataclass(frozen=True, slots=True)
class MinimumSilos:
    """Barrier that releases no silo before ``silos`` silos have joined, and then follows ``inner``.

    Without it, the first silo that joins would get the whole batch.
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
