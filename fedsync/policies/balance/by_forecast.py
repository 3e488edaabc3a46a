"""Balancers by speed forecast: batch sizes in proportion to speed, or sizes that minimise the slowest silo's time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray

from fedsync.core.protocols import Bounds
from fedsync.core.speed.curve import Curve
from fedsync.policies.balance.balancer_base import CurvePolicy, ForecastBalancer, LinearCurve
from fedsync.policies.balance.rounding import check_total, round_shares, round_soonest
from fedsync.policies.schema import Chosen, register


@register("proportional")
@dataclass(frozen=True, slots=True)
class ProportionalBalancer(ForecastBalancer):
    """Batch sizes in proportion to predicted speed; samples above a cap are shared among the other silos.

    ``x_i = X v_i / sum v``: all silos finish a step together. Only speeds count, so the result is exact for linear
    curves. If a floor or a cap binds, the rest is shared in proportion among the other silos.

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

    Each pass shares the rest among the free silos and fixes at least one silo that breaks a bound: only on the side
    with the larger total violation, because a fix on the other side could be undone later.
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


Sizes = NDArray[np.int64]
Seconds = NDArray[np.float64]


@register("equalise")
@dataclass(frozen=True, slots=True)
class EqualisingBalancer(ForecastBalancer):
    """Batch sizes with which the slowest silo finishes as early as possible, for any curves, overhead included.

    The exact whole-number solution of ``min max_i t_i(x_i)`` with ``sum x_i = X`` within bounds, for flat, affine and
    linear curves. The paper solves the problem for linear curves only.

    Source: LB-BSP, section 3.1, equation 3.
    """

    def plan(self, curves: Sequence[Curve], total: int, bounds: Bounds) -> NDArray[np.int64]:
        return minimise_slowest(CurveTimes.of(curves), total, bounds)


def minimise_slowest(times: CurveTimes, total: int, bounds: Bounds) -> Sizes:
    """Sizes within bounds that sum to ``total`` and whose slowest silo takes least; O(n log) vector operations.

    Each silo gets all that it can do in less time than the slowest takes. The rest goes to the silos that can take
    exactly that time, in proportion to their room, by largest remainder, ties to the lowest index. Raises `ConfigError`
    if the bounds cannot hold ``total``.
    """
    check_total(total, bounds)

    def within(seconds: float) -> Sizes:
        return np.clip(times.largest(seconds), bounds.floor, bounds.cap)

    # Bisect between a time that is too short and a time that is long enough. Sizes change only at a silo's own step
    # times, so the result is exact: at the end, no such time lies between the two.
    low, low_s = bounds.floor, -np.inf
    high_s = float(times.seconds(bounds.cap).max(initial=0.0))
    if low.sum() == total:
        return low.astype(np.int64)
    while True:
        next_s = float(times.seconds(low + 1)[low < bounds.cap].min())
        if next_s >= high_s:
            break
        middle_s = max(next_s, (max(low_s, 0.0) + high_s) / 2)
        if middle_s >= high_s:
            middle_s = next_s
        sizes = within(middle_s)
        if sizes.sum() >= total:
            changed = sizes > bounds.floor
            high_s = min(float(times.seconds(sizes)[changed].max()), middle_s)
        elif (sizes == low).all():
            break  # floating point tells no larger size from these: beside an enormous overhead
        else:
            low, low_s = sizes, middle_s
    # Each remaining sample takes `high_s`, whichever silo gets it.
    room = within(high_s) - low
    left = total - int(low.sum())
    return low + round_shares(room * (left / room.sum()), left, room)


@dataclass(frozen=True, slots=True, eq=False)
class CurveTimes:
    """Step times of n curves: speeds [samples/s], launch times [s] and saturations [samples], float64 [n] each."""

    speed: Seconds
    launch_s: Seconds
    saturation: Seconds

    @classmethod
    def of(cls, curves: Sequence[Curve]) -> CurveTimes:
        table = np.array([(c.speed, c.launch_s, c.saturation) for c in curves], dtype=np.float64).reshape(-1, 3)
        if not (np.isfinite(table).all() and (table[:, 0] > 0).all()):
            raise ValueError(f"speeds must be finite and positive, and times finite, not {table}")
        return cls(*table.T.copy())

    def seconds(self, sizes: Sizes) -> Seconds:
        """Seconds of each silo, float64 [n], for sizes int64 [n]; as `Curve.step_s`, to the last bit."""
        return self.launch_s + np.maximum(sizes, self.saturation) / self.speed

    def largest(self, seconds: float) -> Sizes:
        """Largest size of each silo that takes at most ``seconds``, int64 [n]; negative if no size does."""
        # The division may be off by a rounding error, so `seconds` decides among the neighbours.
        guess = np.clip((seconds - self.launch_s) * self.speed, -1.0, _MOST)
        sizes = np.floor(guess).astype(np.int64)
        fits = np.full(len(sizes), -1, dtype=np.int64)
        for candidate in (sizes - 1, sizes, sizes + 1):
            fits = np.where(self.seconds(candidate) <= seconds, candidate, fits)
        return fits


_MOST = 2.0**52
