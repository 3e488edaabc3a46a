"""Multiples where bounds allow, and the exact total always."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsync.common.errors import ConfigError
from fedsync.core.protocols import Balancer, Bounds
from fedsync.core.speed.curve import Curve
from fedsync.policies.balance.by_forecast import EqualisingBalancer, ProportionalBalancer
from fedsync.policies.balance.rounding import InMultiples


def plan(
    inner: Balancer, curves: list[Curve], total: int, floor: list[int], cap: list[int], multiple: int = 8
) -> list[int]:
    return InMultiples(inner, multiple).plan(curves, total, Bounds(np.array(floor), np.array(cap))).tolist()


PAPER = ProportionalBalancer(rounding="largest-remainder")
LINEAR = [Curve(3.0), Curve(2.0), Curve(1.0)]


@pytest.mark.parametrize(
    ("total", "floor", "cap", "expected"),
    [
        (96, [1, 1, 1], [999, 999, 999], [48, 32, 16]),
        (88, [1, 1, 1], [999, 999, 999], [40, 32, 16]),  # 11 eights as 3:2:1 are 5.5, 3.67, 1.83: 5, 4, 2
        (96, [1, 1, 1], [35, 999, 999], [32, 40, 24]),  # 35 holds four eights; the other eight as 2:1
        # 5 holds none: 11 eights and 3 are left: 7.33 and 3.67, 3 to the first with room
        (96, [1, 1, 1], [5, 999, 999], [5, 59, 32]),
        (90, [1, 1, 1], [999, 999, 999], [42, 32, 16]),  # 11 eights and 2, which the first takes
        (96, [1, 1, 20], [999, 999, 22], [42, 32, 22]),  # no eight between 20 and 22: 9 eights and 2 are left
        (70, [20, 20, 20], [25, 25, 25], [22, 24, 24]),  # three twenty-fours are too many: the first takes 2 less
        (24, [8, 8, 8], [8, 8, 8], [8, 8, 8]),
    ],
)
def test_plan_by_hand(total: int, floor: list[int], cap: list[int], expected: list[int]) -> None:
    sizes = plan(PAPER, LINEAR, total, floor, cap)
    assert sum(sizes) == total
    assert sizes == expected


def test_a_multiple_that_is_left_goes_to_the_silo_that_ends_it_first() -> None:
    """Of 8 eights 7.2 and 0.8: the 8th ends at 0.89 of the second's first."""
    assert plan(ProportionalBalancer(), [Curve(9.0), Curve(1.0)], 64, [0, 0], [99, 99]) == [64, 0]


def test_the_curves_are_those_of_multiples() -> None:
    """Of 9 eights: 0.5 + 8 x 5 / 100 = 0.9 against 8 x 4 / 40 = 0.8; with 6 and 3 it would be 0.98."""
    assert plan(EqualisingBalancer(), [Curve(100.0, 0.5, 40), Curve(40.0)], 72, [1, 1], [99, 99]) == [40, 32]


@pytest.mark.parametrize("inner", [ProportionalBalancer(), EqualisingBalancer()])
@pytest.mark.parametrize("multiple", [None, 8])
@pytest.mark.parametrize(("total", "floor", "cap"), [(5, 3, 10), (24, 1, 10)])
def test_an_impossible_total_is_said_in_samples(
    inner: Balancer, multiple: int | None, total: int, floor: int, cap: int
) -> None:
    balancer = inner if multiple is None else InMultiples(inner, multiple)
    with pytest.raises(ConfigError, match=f"2 silos can take {2 * floor} to {2 * cap} samples.* together, not {total}"):
        balancer.plan(LINEAR[:2], total, Bounds(np.full(2, floor), np.full(2, cap)))


@pytest.mark.slow
@given(st.data())
def test_totals_are_exact_and_multiples_kept_wherever_bounds_and_total_are_some(data: st.DataObject) -> None:
    n, multiple = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 9))
    fine = data.draw(st.booleans())
    unit = multiple if fine else 1
    floor = unit * np.array(data.draw(st.lists(st.integers(0, 20), min_size=n, max_size=n)))
    cap = floor + unit * np.array(data.draw(st.lists(st.integers(0, 40), min_size=n, max_size=n)))
    total = unit * data.draw(st.integers(int(floor.sum()) // unit, int(cap.sum()) // unit))
    curves = [Curve(data.draw(st.floats(0.1, 100.0)), data.draw(st.floats(0, 3)), 7) for _ in range(n)]
    inner = data.draw(st.sampled_from([ProportionalBalancer(), EqualisingBalancer()]))
    sizes = InMultiples(inner, multiple).plan(curves, total, Bounds(floor, cap))
    assert sizes.sum() == total
    assert (floor <= sizes).all()
    assert (sizes <= cap).all()
    if fine:
        assert (sizes % multiple == 0).all()
