"""An order queued at each silo, so that it trains while its last update travels.

Without it a silo computes nothing from the end of its training until its update has travelled, all others' are in and
the next order is there. Here that order is at the silo already:

The barrier inside sees rounds as they are without that. Of each silo it sees what is oldest of its orders that are not
committed yet:

| the oldest of a silo's orders | the barrier inside sees |
|---|---|
| there is none | an idle silo |
| is in work | a busy silo |
| is answered | an idle silo, and that update. What it sent since then is not shown: it is for the next round |

Whoever is released gets as many orders as it takes to have two: both, at the beginning, from one version. So the commit
of round k - 1 gives the orders of round k + 1, and each update is one version old when it is committed, but for those
of the first round, as long as nobody is late. A silo that has answered both waits.

Where silos train for ``c`` seconds an order and need ``o`` besides, a round takes ``max(c, (c + o) / 2)`` seconds
instead of ``c + o``.

A silo whose last order failed gets one order at a time until one succeeds: who keeps failing is to rest.
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
    """``inner``, and each silo has its next order before it has sent its update.

    It pays where an order costs as much besides training as training takes, or more: then a round takes about half the
    seconds. It costs rounds, since updates are one version old. Where overhead is small it is a loss.

    Source: pipelined and delayed averaging, for example Shen et al. 2019, "Faster distributed deep net training:
    computation and communication decoupled stochastic gradient descent" (CoCoD-SGD), arXiv:1906.12043; Wang, Liang and
    Joshi 2020, "Overlap Local-SGD", arXiv:2002.09539.
    """

    inner: Inner
    """A barrier with rounds, bsp or a-bsp, or capped, quorum or deadline around one of them."""

    carry: PartOfOne = 0.0
    """Share of its own last update that a silo begins a queued order with, on top of the model: 0 is the plain delay, 1
    is CoCoD-SGD, which keeps own progress whole and gets the others' one round late."""

    def __post_init__(self) -> None:
        inner = self.inner
        if inner.queues:
            raise ValueError("overlap inside overlap: a silo has two orders at most; write one of them")
        if not inner.innermost.rounds:
            raise ValueError(
                f"overlap queues the next round's orders, and barrier.kind {inner.innermost.kind!r} has no rounds for "
                "that: its silos go on one by one, or its orders end at a time that is set before; choose bsp or a-bsp"
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
    def queues(self) -> bool:
        return True

    @property
    def carries(self) -> bool:
        return self.carry > 0

    def least_updates(self, silos: int) -> int:
        return self.inner.least_updates(silos)

    def init(self) -> Any:
        return self.inner.init()

    def decide(self, state: Any, view: ClusterView) -> tuple[Any, Verdict]:
        """Ask ``inner`` about silos as in the table above; O(n)."""
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
    """A silo as the barrier inside sees it: its round began when it was given the order that is queued."""
    if silo.order is None:
        return silo
    if sent:
        return replace(silo, order=None, queued=None, progress_steps=0)
    if silo.queued is None:
        return silo
    order = replace(silo.order, base_version=silo.queued.base_version)
    return replace(silo, order=order, since_s=silo.queued_s, queued=None)
