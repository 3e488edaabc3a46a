"""Hold any barrier back until enough silos have joined."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedsync.core.protocols import AnyBarrier
from fedsync.core.views import ClusterView, Verdict


@dataclass(frozen=True, slots=True)
class MinimumState:
    """``started`` once enough silos were there; ``inner`` belongs to the wrapped barrier."""

    started: bool
    inner: Any


@dataclass(frozen=True, slots=True)
class MinimumSilos:
    """Release nobody before ``silos`` silos have joined; afterwards, whatever ``inner`` says.

    Without it the first silo that joins would get the whole batch.

    Args:
        inner: the barrier to hold back.
        silos: how many have to be there for the run to begin.
    """

    inner: AnyBarrier
    silos: int

    def init(self) -> MinimumState:
        return MinimumState(False, self.inner.init())

    def decide(self, state: MinimumState, view: ClusterView) -> tuple[MinimumState, Verdict]:
        """Ask ``inner`` once the run has started."""
        if not state.started and len(view.silos) < self.silos:
            return state, Verdict(reason=f"{len(view.silos)} of {self.silos} silos have joined")
        inner, verdict = self.inner.decide(state.inner, view)
        return state if state.started and inner is state.inner else MinimumState(True, inner), verdict
