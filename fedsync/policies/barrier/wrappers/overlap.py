"""Queued orders: each silo continues with its next training request (order) while its last update is sent.

Without a queued order, a silo is idle after its training, until its update has been sent, all other updates are in and
the next order has arrived. The inner barrier sees each silo's oldest uncommitted order:

| the oldest order of a silo | the inner barrier sees |
|---|---|
| none | an idle silo |
| in work | a busy silo |
| answered | an idle silo and its update; later updates of the silo are hidden until the next round |

A released silo gets orders until it has two orders; at the start, both orders begin with the same version. So the
commit of round k - 1 gives the orders of round k + 1. Each update is one version old when it is committed, except in
the first round, as long as no silo is late. A silo that has answered both orders waits.

If silos train for ``c`` seconds per order with an overhead of ``o``, a round takes ``max(c, (c + o) / 2)`` seconds
instead of ``c + o``. A silo whose last order failed gets one order at a time until an order succeeds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from fedsync.core.orders import UpdateMeta
from fedsync.core.views import ClusterView, SiloView, Verdict
from fedsync.policies.barrier.barrier_base import BarrierPolicy, Inner, within
from fedsync.policies.schema import PartOfOne, register


@register("overlap")
@dataclass(frozen=True, slots=True)
class Overlap(BarrierPolicy[Any]):
    """Barrier ``inner`` with queued orders: each silo has its next order before it has sent its update.

    Overlap pays if the overhead of an order is as long as its training, or longer. Updates are one version old, so
    training needs more rounds. With little overhead, training gets slower.

    Source: pipelined and delayed averaging, for example Shen et al. 2019, "Faster distributed deep net training:
    computation and communication decoupled stochastic gradient descent" (CoCoD-SGD), arXiv:1906.12043; Wang, Liang and
    Joshi 2020, "Overlap Local-SGD", arXiv:2002.09539.
    """

    inner: Inner
    """Barrier with rounds: ``bsp`` or ``a-bsp``, or ``capped``, ``quorum`` or ``deadline`` around one of them."""

    carry: PartOfOne = 0.0
    """Share of its own last update that a silo adds to the model when it begins a queued order. 0 is the plain delay. 1
    is CoCoD-SGD: a silo keeps its own progress whole and gets the progress of the others one round late."""

    queues = True

    def __post_init__(self) -> None:
        inner = self.inner
        if inner.queues:
            raise ValueError("overlap inside overlap: a silo has two orders at most; write one of them")
        if not inner.innermost.rounds:
            raise ValueError(
                f"overlap queues orders of the next round, but under barrier.kind {inner.innermost.kind!r} silos "
                "continue one by one, or orders end at a fixed time; choose bsp or a-bsp"
            )
        if inner.draws:
            raise ValueError("overlap keeps all silos at work, and fraction has some sit a round out; take one away")

    @property
    def innermost(self) -> BarrierPolicy[Any]:
        return self.inner.innermost

    @property
    def named_silos(self) -> dict[str, int]:
        return within(self.inner)

    @property
    def carries(self) -> bool:
        return self.carry > 0

    def least_updates(self, silos: int) -> int:
        return self.inner.least_updates(silos)

    def init(self) -> Any:
        return self.inner.init()

    def decide(self, state: Any, view: ClusterView) -> tuple[Any, Verdict]:
        oldest: dict[str, UpdateMeta] = {}
        for meta in view.pending.values():
            oldest.setdefault(meta.silo, meta)
        pending = {meta.update_id: meta for meta in oldest.values()}
        silos = {name: _shown(silo, sent=name in oldest) for name, silo in view.silos.items()}
        after, verdict = self.inner.decide(state, replace(view, silos=silos, pending=pending, index=None))
        gone = {*verdict.commit, *verdict.discard}
        ahead = Counter(meta.silo for meta in view.pending.values() if meta.update_id not in gone)
        release, queue = [], []
        for name in verdict.release:
            silo = view.silos[name]
            wanted = 2 - bool(silo.failures) - ahead[name] - len(silo.orders)
            if wanted > 0 and not silo.busy:
                release.append(name)
                wanted -= 1
            if wanted > 0 and view.has_time(name):
                queue.append(name)
        return after, replace(verdict, release=tuple(release), queue=tuple(queue), carry=self.carry)


def _shown(silo: SiloView, *, sent: bool) -> SiloView:
    """Return a silo as the inner barrier sees it; its round began when it received the queued order."""
    if silo.order is None:
        return silo
    if sent:
        return replace(silo, order=None, queued=None, progress_steps=0)
    if silo.queued is None:
        return silo
    order = replace(silo.order, base_version=silo.queued.base_version)
    return replace(silo, order=order, since_s=silo.queued_s, queued=None)
