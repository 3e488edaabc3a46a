"""Hold any barrier back while silos would open no sum of what it commits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fedsync.core.protocols import AnyBarrier
from fedsync.core.views import ClusterView, Verdict


@dataclass(frozen=True, slots=True)
class OpenableSums:
    """A barrier as ``inner``, without commits of fewer than ``least`` silos, whose encrypted sum would stay closed.

    While fewer silos than that take part, nobody is released: the run waits. A commit that comes too early is held
    back, and idle silos without an update get an order, until enough updates are in. Then ``inner`` is asked again.

    Args:
        inner: the barrier to hold back.
        least: silos whose updates a sum needs.
    """

    inner: AnyBarrier
    least: int

    def init(self) -> Any:
        return self.inner.init()

    def decide(self, state: Any, view: ClusterView) -> tuple[Any, Verdict]:
        """Ask ``inner``; where its answer is held back, its state stays as it was."""
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
            # Nobody else will send: what is there is enough, for everybody who is here has sent.
            return inner, replace(verdict, commit=tuple(view.pending))
        reason = f"a sum needs the updates of {self.least} silos, {len(committed)} are in"
        held = replace(verdict, rollback=False, commit=(), savepoint=False, release=missing, queue=(), reason=reason)
        return state, held
