"""FedBuff: commits of a fixed number of updates."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from math import inf

from fedsync.core.views import ClusterView, Verdict
from fedsync.policies.barrier.barrier_base import BarrierPolicy
from fedsync.policies.barrier.kinds.ssp import Failures, failed, ready
from fedsync.policies.schema import PositiveInt, register


@register("buffered")
@dataclass(frozen=True, slots=True)
class Buffered(BarrierPolicy[Failures]):
    """FedBuff barrier: every ``size`` updates are committed, the oldest first, and no silo waits.

    A silo takes the newest model as soon as it has uploaded its update. So a fast silo may have several updates in one
    commit, and ``size`` may exceed the number of silos. With size 1 this is ASP.

    Source: FedBuff (Nguyen et al. 2022, arXiv:2106.06639), Algorithm 1. The aggregation sets the coefficients,
    eta_g / K * s(staleness).
    """

    size: PositiveInt
    """Updates per commit, from any silos; K in the paper."""

    most_ahead = inf

    @property
    def most_updates(self) -> int:
        return self.size

    def init(self) -> Failures:
        return {}

    def decide(self, state: Failures, view: ClusterView) -> tuple[Failures, Verdict]:
        idle = view.idle
        failures = failed(state, idle, view)
        if len(view.pending) >= self.size:
            commit = tuple(islice(view.pending, self.size))
            return failures, Verdict(commit=commit, reason=f"{self.size} updates are in")
        release = ready(failures, idle, view)
        filled = f"{len(view.pending)} of {self.size} updates are in"
        return failures, Verdict(release=release, reason=f"{filled}; {len(release)} silos go on" if release else filled)
