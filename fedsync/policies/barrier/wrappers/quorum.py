"""Quorum for any barrier: part of the updates is enough."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedsync.core.views import ClusterView, Verdict
from fedsync.policies.barrier.barrier_base import Inner, within
from fedsync.policies.barrier.late import LateRule, LateState, Wrapper, decide_without_late
from fedsync.policies.schema import PositiveInt, Share, register


@dataclass(frozen=True, slots=True)
class Required:
    """Number of silos that make a quorum.

    Args:
        count: number of silos, or all if fewer take part; None to use ``share``.
        share: share of the silos that take part, rounded up.
    """

    count: int | None = None
    share: float = 1.0

    def of(self, silos: int) -> int:
        """Quorum out of ``silos`` silos; at least 1."""
        if self.count is not None:
            return max(min(self.count, silos), 1)
        # 0.6 x 5 may give 3.0000000000000004, which must not round up to 4.
        return max(math.ceil(self.share * silos - 1e-9), 1)


def has_quorum(view: ClusterView, required: Required) -> bool:
    """Whether enough of the participating silos, those with a pending update or an order in work, have sent."""
    sent = {meta.silo for meta in view.pending.values()}
    part = sent.union(name for name, silo in view.silos.items() if silo.order is not None)
    return len(sent) >= required.of(len(part))


@register("quorum")
@dataclass(frozen=True, slots=True)
class Quorum(Wrapper[LateState]):
    """Barrier ``inner`` that needs only ``count`` silos, or a ``share`` of the participating silos.

    Once the quorum has sent updates, the silos still busy are late. Around BSP, a round ends with its quorum. A round
    with more silos than the quorum is over-selection: the slowest silos do not delay the round, and with ``late: drop``
    their updates are discarded by name.

    Source: over-selection as in Bonawitz et al. 2019, "Towards federated learning at scale", arXiv:1902.01046.
    """

    inner: Inner
    count: PositiveInt | None = None
    """Number of silos that make a quorum. Write either ``count`` or ``share``."""

    share: Share | None = None
    """Share of the round's silos that makes a quorum, rounded up. Write either ``share`` or ``count``."""

    late: LateRule = LateRule.NEXT

    def __post_init__(self) -> None:
        if (self.count is None) == (self.share is None):
            raise ValueError("how many are enough is not clear; write either `count` or `share`")
        Wrapper.__post_init__(self)

    @property
    def named_silos(self) -> dict[str, int]:
        return {"count": self.count or 1, **within(self.inner)}

    def least_updates(self, silos: int) -> int:
        return Required(self.count, self.share or 1.0).of(self.sampled(silos))

    def init(self) -> LateState:
        return LateState(frozenset(), self.inner.init())

    def decide(self, state: LateState, view: ClusterView) -> tuple[LateState, Verdict]:
        return decide_without_late(self.inner, state, view, self.late, self._judge)

    def _judge(self, visible: ClusterView) -> list[str]:
        if not has_quorum(visible, Required(self.count, self.share or 1.0)):
            return []
        return [name for name, silo in visible.silos.items() if silo.order is not None]
