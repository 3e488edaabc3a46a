"""Batches in proportion to speed: a table by hand, and what holds for every table."""

import numpy as np
import pytest

from fedsync.core.protocols import Bounds
from fedsync.core.speed.curve import Curve
from fedsync.policies.balance.by_forecast import ProportionalBalancer

ROOMY = 10**6


def plan(
    speeds: list[float],
    total: int,
    floor: list[int] | int = 1,
    cap: list[int] | int = ROOMY,
    balancer: ProportionalBalancer = ProportionalBalancer(),  # noqa: B008
) -> list[int]:
    n = len(speeds)
    bounds = Bounds(np.broadcast_to(np.int64(floor), n), np.broadcast_to(np.int64(cap), n))
    sizes = balancer.plan([Curve(speed) for speed in speeds], total, bounds)
    assert sizes.dtype == np.int64
    return sizes.tolist()


@pytest.mark.parametrize(
    ("speeds", "total", "floor", "cap", "expected"),
    [
        ([4, 2, 1], 70, 1, ROOMY, [40, 20, 10]),
        ([300, 250, 200, 150, 100], 160, 1, ROOMY, [48, 40, 32, 24, 16]),  # a thousandth a unit of speed: 0.16
        ([1, 1, 1], 10, 1, ROOMY, [4, 3, 3]),  # the remainder goes to index 0
        ([1, 1, 1], 11, 1, ROOMY, [4, 4, 3]),
        ([5, 3, 2], 7, 1, ROOMY, [4, 2, 1]),  # 3.5, 2.1, 1.4: a fourth of the first ends after 0.8, others after 1
        ([6, 3, 1], 12, 1, ROOMY, [7, 4, 1]),  # 7.2, 3.6, 1.2: the first's 8th would end with the second's 4th
        ([200] * 7 + [20], 256, 1, ROOMY, [37, *[36] * 6, 3]),  # 36.06 and 3.6: 37 / 200 is 0.185, 4 / 20 would be 0.2
        ([100, 10, 10, 10], 22, 1, ROOMY, [19, 1, 1, 1]),  # 16.9, 1.7: three are left, all for the first, by 0.19
        ([100, 10, 10, 10], 22, 1, [18, 99, 99, 99], [18, 2, 1, 1]),  # it may take one of them only
        ([0.3, 0.1], 4, 1, ROOMY, [3, 1]),  # 2.9999999999999996 is 3
        ([3, 1], 8, 0, [4, 8], [4, 4]),  # 6, 2: capped at 4, the rest is the other's
        ([3, 1, 1], 100, 1, [40, 100, 100], [40, 30, 30]),  # 60, 20, 20: 20 are cut off and shared 1:1
        ([3, 2, 1], 60, 1, [20, 100, 100], [20, 27, 13]),  # 30, 20, 10: the rest of 40 as 26.7 and 13.3
        ([9, 3, 1], 130, 1, [50, 50, 50], [50, 50, 30]),  # 90, 30, 10; then 50, 60, 20; then 50, 50, 30
        ([100, 1], 10, 4, ROOMY, [6, 4]),  # 9.9, 0.1: the floor binds
        ([98, 1, 1], 100, 10, ROOMY, [80, 10, 10]),
        ([90, 9, 1], 100, [1, 12, 1], ROOMY, [87, 12, 1]),  # 90, 9, 1: 3 for the floor come from the others, 90:1
        ([8, 1, 1], 100, [1, 1, 20], [60, 100, 100], [60, 20, 20]),  # 80, 10, 10: above by 20, below by 10: cap first
        ([8, 1, 1], 100, [1, 30, 30], [70, 100, 100], [40, 30, 30]),  # above by 10, below by 40: floors first
        ([7], 33, 1, ROOMY, [33]),
        ([2, 2], 6, [3, 3], [3, 3], [3, 3]),  # no freedom at all
        ([1e9, 1e-3], 10, 1, ROOMY, [9, 1]),
        ([1, 1, 1], 0, 0, ROOMY, [0, 0, 0]),
    ],
)
def test_plan_by_hand(
    speeds: list[float], total: int, floor: list[int] | int, cap: list[int] | int, expected: list[int]
) -> None:
    assert plan(speeds, total, floor, cap) == expected


def test_only_speed_counts() -> None:
    curves = [Curve(3.0, launch_s=9.0, saturation=50), Curve(1.0)]
    bounds = Bounds(np.array([1, 1]), np.array([100, 100]))
    assert ProportionalBalancer().plan(curves, 40, bounds).tolist() == [30, 10]


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan"), float("inf")])
def test_a_speed_that_no_machine_has_is_refused(speed: float) -> None:
    bounds = Bounds(np.array([1, 1]), np.array([9, 9]))
    with pytest.raises(ValueError, match="finite and positive"):
        ProportionalBalancer().plan([Curve(1.0), Curve(speed)], 10, bounds)
