"""The slowest silo is as fast as it can be: against brute force, for curves and for any table that never falls."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedsync.core.protocols import Bounds
from fedsync.core.speed.curve import Curve
from fedsync.policies.balance.by_forecast import CurveTimes, EqualisingBalancer, minimise_slowest

ROOMY = 10**6


def plan(curves: list[Curve], total: int, floor: list[int] | int = 1, cap: list[int] | int = ROOMY) -> list[int]:
    n = len(curves)
    bounds = Bounds(np.broadcast_to(np.int64(floor), n), np.broadcast_to(np.int64(cap), n))
    sizes = EqualisingBalancer().plan(curves, total, bounds)
    assert sizes.dtype == np.int64
    return sizes.tolist()


GPU = Curve(100.0, launch_s=0.5)
SATURATED = Curve(100.0, launch_s=0.5, saturation=40)


@pytest.mark.parametrize(
    ("curves", "total", "bounds", "expected"),
    [
        ([Curve(4), Curve(2), Curve(1)], 70, {}, [40, 20, 10]),  # linear: as in proportion, 10 s each
        ([GPU, Curve(20.0)], 70, {}, [50, 20]),  # 0.5 + 50/100 = 1 = 20/20
        ([GPU, Curve(20.0)], 71, {}, [51, 20]),  # 1.01 against 21/20 = 1.05
        ([GPU, GPU], 31, {}, [16, 15]),  # a tie goes to the lowest index
        ([SATURATED, Curve(20.0)], 30, {}, [13, 17]),  # the first takes 0.9 s anyway; in less the second can do 17
        ([SATURATED, SATURATED, Curve(10.0)], 60, {}, [26, 26, 8]),  # in less than 0.9 s the third can do 8
        ([Curve(1.0, launch_s=9.0), Curve(1.0)], 8, {}, [1, 7]),  # the floor alone takes 10 s: the rest is free
        ([GPU, Curve(20.0)], 70, {"cap": [30, 100]}, [30, 40]),  # the cap binds
        ([GPU, Curve(20.0)], 70, {"floor": [1, 30]}, [40, 30]),  # the floor binds
        ([Curve(2.0), Curve(2.0)], 6, {"floor": [3, 3], "cap": [3, 3]}, [3, 3]),  # no freedom at all
        ([Curve(7.0)], 33, {}, [33]),
        ([Curve(1.0)] * 3, 0, {"floor": 0}, [0, 0, 0]),
        ([Curve(1e9), Curve(1e-3)], 10, {}, [9, 1]),
    ],
)
def test_plan_by_hand(curves: list[Curve], total: int, bounds: dict[str, list[int] | int], expected: list[int]) -> None:
    assert plan(curves, total, **bounds) == expected


@pytest.mark.parametrize("curve", [Curve(0.0), Curve(-1.0), Curve(float("nan")), Curve(1.0, float("inf"))])
def test_a_curve_that_no_machine_has_is_refused(curve: Curve) -> None:
    with pytest.raises(ValueError, match="finite"):
        plan([GPU, curve], 10)


numbers = st.sampled_from([0.0, 0.25, 0.5, 1.0]) | st.floats(0.0, 100.0)
curves = st.builds(
    Curve, st.sampled_from([1.0, 2.0, 3.0, 10.0]) | st.floats(1e-3, 1e6), numbers, st.integers(0, 6) | st.floats(0, 9.0)
)


@dataclass(frozen=True)
class Table:
    """Times from a table, float64 [n, sizes + 1]: rows never fall, and are otherwise anything."""

    table: NDArray[np.float64]

    def seconds(self, sizes: NDArray[np.int64]) -> NDArray[np.float64]:
        last = self.table.shape[1] - 1
        found: NDArray[np.float64] = self.table[np.arange(len(self.table)), np.minimum(sizes, last)]
        return found

    def largest(self, seconds: float) -> NDArray[np.int64]:
        return np.array([np.searchsorted(row, seconds, side="right") - 1 for row in self.table], dtype=np.int64)


@st.composite
def bounds_and_total(draw: st.DrawFn, n: int, most: int) -> tuple[Bounds, int]:
    floor = np.array(draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)))
    cap = np.minimum(floor + np.array(draw(st.lists(st.integers(0, most), min_size=n, max_size=n))), most)
    return Bounds(floor, cap), draw(st.integers(int(floor.sum()), int(cap.sum())))


def best(times: Table | CurveTimes, total: int, bounds: Bounds) -> list[float]:
    """Times, slowest first, of the best of all sizes there are."""
    ranges = [range(low, high + 1) for low, high in zip(bounds.floor, bounds.cap, strict=True)]
    every = (np.array(sizes) for sizes in itertools.product(*ranges) if sum(sizes) == total)
    return min(sorted(times.seconds(sizes).tolist(), reverse=True) for sizes in every)


def check(times: Table | CurveTimes, total: int, bounds: Bounds) -> None:
    sizes = minimise_slowest(times, total, bounds)
    assert sizes.sum() == total
    assert (bounds.floor <= sizes).all()
    assert (sizes <= bounds.cap).all()
    found = sorted(times.seconds(sizes).tolist(), reverse=True)
    assert found[0] == best(times, total, bounds)[0], "exactly, not about"
    assert minimise_slowest(times, total, bounds).tolist() == sizes.tolist()


@pytest.mark.slow
@settings(max_examples=150)
@given(st.data())
def test_any_times_that_never_fall_are_solved_as_brute_force_solves_them(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 4))
    bounds, total = data.draw(bounds_and_total(n, 6))
    steps = st.lists(st.sampled_from([0.0, 0.0, 1.0]) | st.floats(0.0, 10.0), min_size=7, max_size=7)
    table = np.cumsum(np.array(data.draw(st.lists(steps, min_size=n, max_size=n))), axis=1)
    check(Table(table), total, bounds)


@given(st.lists(curves, min_size=1, max_size=8), numbers | st.floats(0, 1e4))
def test_the_largest_size_within_a_time_is_just_that(many: list[Curve], seconds: float) -> None:
    """Whatever rounding does: the size fits, the next does not."""
    times = CurveTimes.of(many)
    sizes = times.largest(seconds)
    fits = sizes >= 0
    assert (times.seconds(np.maximum(sizes, 0))[fits] <= seconds).all()
    assert (times.seconds(sizes + 1) > seconds).all()


def test_ten_thousand_silos_are_solved_at_once() -> None:
    """Whole shares of a level that is known: t = 2 s, sizes 100, 150 and 200 in turn."""
    thirds = [Curve(100.0, 1.0), Curve(100.0, 0.5), Curve(100.0)] * 3333
    assert plan(thirds, 3333 * 450) == [100, 150, 200] * 3333


def test_an_enormous_overhead_of_one_silo_does_not_keep_the_server_busy_for_ever() -> None:
    """Beside 10^9 s, floating point does not tell the time of a step from that of a step with one sample more."""
    liar = Curve(83760681.92589092, 1000000000.0021805)
    fleet = [Curve(48.27, 1000.0), liar, Curve(12889048.7, 0.00046, 5.07), Curve(387097.3), Curve(0.00100786120333)]
    fleet += [Curve(78.8), Curve(69.4, 0.0036, 53.8), Curve(4100117.1)]
    sizes = plan(fleet, 120, floor=[8, 8, 8, 8, 16, 8, 8, 0], cap=[20, 20, 20, 16, 16, 8, 20, 0])
    assert sum(sizes) == 120
