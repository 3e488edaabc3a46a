"""What a balancer of a strategy file becomes, and which work it refuses."""

import numpy as np
import pytest

from fedsync.core.orders import LocalWork
from fedsync.core.protocols import Bounds
from fedsync.core.speed.curve import Curve
from fedsync.core.speed.fitting import CurveFitter
from fedsync.core.speed.sizing import Scale, Sizing
from fedsync.policies.balance.balancer_base import AffineCurve, FixedBalancer, LinearCurve
from fedsync.policies.balance.by_forecast import EqualisingBalancer, ProportionalBalancer
from fedsync.policies.balance.rounding import InMultiples

WORK = LocalWork(4, 8, 0.1)


def test_bounds_that_leave_the_mean_some_room_are_no_trouble() -> None:
    ProportionalBalancer(floor=7, cap=9).check(8)
    ProportionalBalancer(floor=1, cap=12, multiple=4).check(8)
    ProportionalBalancer(scale="steps").check(1)
    FixedBalancer().check(1)
    for bounds in ({"floor": 8}, {"cap": 8}, {"floor": 5, "multiple": 8}):
        with pytest.raises(ValueError, match="nothing would be balanced"):
            ProportionalBalancer(**bounds).check(8)


def test_what_is_written_becomes_the_sizing() -> None:
    plain = ProportionalBalancer()
    assert plain.sizing(WORK) == Sizing(WORK, plain, Scale.BATCH, 1, None, None, None)
    bounded = EqualisingBalancer(floor=2, cap=20, multiple=4)
    assert bounded.sizing(WORK) == Sizing(WORK, InMultiples(bounded, 4), Scale.BATCH, 2, 20, None, CurveFitter())
    assert EqualisingBalancer(curve=LinearCurve()).sizing(WORK).fitter is None
    assert ProportionalBalancer(curve=AffineCurve()).sizing(WORK).fitter == CurveFitter()
    declared = EqualisingBalancer(speeds="declared")
    assert (declared.declared, declared.sizing(WORK).fitter) == (True, None)
    assert not plain.declared
    steps = ProportionalBalancer(scale="steps")
    assert (steps.scales_steps, plain.scales_steps) == (True, False)
    assert steps.sizing(WORK).scale is Scale.STEPS
    assert FixedBalancer().sizing(WORK) == Sizing(WORK)


def test_an_odd_total_goes_in_multiples_as_far_as_it_does() -> None:
    sizes = InMultiples(ProportionalBalancer(), 4).plan(
        [Curve(1.0), Curve(3.0)], 18, Bounds(np.array([1, 1]), np.array([18, 18]))
    )
    assert sizes.tolist() == [6, 12]  # 4 and 12 of 16, and the two that are left to the first
