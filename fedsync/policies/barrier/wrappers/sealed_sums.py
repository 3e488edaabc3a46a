"""Wrapper that prevents commits whose encrypted sum the silos would not open."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fedsync.core.protocols import AnyBarrier
from fedsync.core.views import ClusterView, Verdict


@dataclass(frozen=True, slots=True)
class OpenableSums:
    """Barrier ``inner`` without commits of fewer than ``least`` silos, whose encrypted sum would stay closed.

    While fewer than ``least`` silos can take part, no silo is released and the run waits. An early commit is held back,
    and idle silos without an update get an order, until enough updates are in. Then ``inner`` is asked again.
    """

    inner: AnyBarrier
    least: int

    def init(self) -> Any:
        return self.inner.init()

    def decide(self, state: Any, view: ClusterView) -> tuple[Any, Verdict]:
        """Ask ``inner``; if its verdict is held back, its state stays unchanged."""
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
        held = replace(verdict, rollback=False, commit=(), savepoint=False, release=missing, queue=(), reason=reason)
        return state, held
