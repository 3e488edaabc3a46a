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
    """Batch sizes in proportion to predicted speed; what a cap cuts off is shared among the other silos.

    ``x_i = X v_i / sum v``: all silos finish a step together. Only speeds count, so the result is exact for linear
    curves. If a floor or a cap binds, the rest is shared in proportion among the other silos. Shares are rounded down,
    and `rounding` distributes the remaining samples.

    Source: LB-BSP, Algorithm 1 (section 3.2) and section 3.5 for federated learning.
    """

    curve: Annotated[CurvePolicy, Chosen("curve")] = field(default_factory=LinearCurve)

    rounding: Literal["soonest", "largest-remainder"] = "soonest"
    """Distribution of the samples that remain after rounding down. ``soonest``: to the silo that would end its step
    first, which is optimal for the slowest silo (LB-BSP's problem 3). ``largest-remainder``: as in the paper."""

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

    Each pass shares the rest among the free silos. Silos that break a bound are fixed at it, only on the side with the
    larger total violation, because a fix on the other side could be undone later. Each pass fixes at least one silo.
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
