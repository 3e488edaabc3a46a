"""Batch sizes in proportion to speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray

from fedsync.core.protocols import Bounds
from fedsync.core.speed.curve import Curve
from fedsync.policies.balance.balancer_base import CurvePolicy, ForecastBalancer, LinearCurve
from fedsync.policies.balance.whole import check_total, round_shares, round_soonest
from fedsync.policies.schema import Chosen, register


@register("proportional")
@dataclass(frozen=True, slots=True)
class ProportionalBalancer(ForecastBalancer):
    """Work in proportion to predicted speed; what a cap cuts off is shared among the others.

    ``x_i = X v_i / sum v``: all silos finish a step together. Looks at the speeds alone, so it is exact for linear
    curves. Where a floor or a cap binds, the rest is shared in proportion among the others. Shares are rounded down,
    and the samples that are left are given out by `rounding`.

    Source: LB-BSP, Algorithm 1 (section 3.2) and section 3.5 for federated learning.
    """

    curve: Annotated[CurvePolicy, Chosen("curve")] = field(default_factory=LinearCurve)

    rounding: Literal["soonest", "largest-remainder"] = "soonest"
    """The silo that gets a sample that is left: the one that would end its step first with it, which makes the slowest
    silo as fast as whole numbers let it be (LB-BSP's problem 3); or the one with the largest remainder, as in the
    paper."""

    def plan(self, curves: Sequence[Curve], total: int, bounds: Bounds) -> NDArray[np.int64]:
        speeds = np.array([curve.speed for curve in curves], dtype=np.float64)
        if not (np.isfinite(speeds) & (speeds > 0)).all():
            raise ValueError(f"speeds must be finite and positive, not {speeds}")
        check_total(total, bounds)
        shares = _clamped_shares(speeds, total, bounds)
        if self.rounding == "soonest":
            return round_soonest(shares, total, bounds.cap, speeds)
        return round_shares(shares, total, bounds.cap)


def _clamped_shares(speeds: NDArray[np.float64], total: int, bounds: Bounds) -> NDArray[np.float64]:
    """Real-valued shares proportional to speed, within bounds, summing to ``total``.

    Shares what is left among the silos not yet fixed; those that break a bound are fixed at it, only
    on the side that breaks more in sum (fixing the other side could be undone later); repeats.
    Each pass fixes a silo at least, so n passes end it.
    """
    shares = np.zeros(len(speeds))
    free = np.ones(len(speeds), dtype=bool)
    while free.any():
        rest = total - shares[~free].sum()
        shares[free] = rest * speeds[free] / speeds[free].sum()
        above = np.where(free, shares - bounds.cap, 0.0).clip(min=0)
        below = np.where(free, bounds.floor - shares, 0.0).clip(min=0)
        if not above.any() and not below.any():
            break
        too_large = above.sum() >= below.sum()
        broken = (above if too_large else below) > 0
        shares[broken] = (bounds.cap if too_large else bounds.floor)[broken]
        free &= ~broken
    return shares
