"""Work that a balancer refuses, and totals that are no multiples."""

import numpy as np
import pytest

from fedsync.core.protocols import Bounds
from fedsync.core.speed.curve import Curve
from fedsync.policies.balance.balancer_base import FixedBalancer
from fedsync.policies.balance.by_forecast import ProportionalBalancer
from fedsync.policies.balance.rounding import InMultiples


def test_bounds_that_leave_the_mean_some_room_are_no_trouble() -> None:
    ProportionalBalancer(floor=7, cap=9).check(8)
    ProportionalBalancer(floor=1, cap=12, multiple=4).check(8)
    ProportionalBalancer(scale="steps").check(1)
    FixedBalancer().check(1)
    for bounds in ({"floor": 8}, {"cap": 8}, {"floor": 5, "multiple": 8}, {"cap": 11, "multiple": 4}):
        with pytest.raises(ValueError, match="nothing would be balanced"):
            ProportionalBalancer(**bounds).check(8)


def test_an_odd_total_goes_in_multiples_as_far_as_it_does() -> None:
    sizes = InMultiples(ProportionalBalancer(), 4).plan(
        [Curve(1.0), Curve(3.0)], 18, Bounds(np.array([1, 1]), np.array([18, 18]))
    )
    assert sizes.tolist() == [6, 12]  # 4 and 12 of 16, and the two that are left to the first
