"""What each update counts."""

import math

import pytest

from fedsync.core.orders import UpdateMeta
from fedsync.core.silo_weight import PRECISION_UNIT, Share, Weighting
from fedsync.policies.aggregate.weighers import Constant, Discount, Hinge, Polynomial, WeightedMean

METAS = [
    UpdateMeta("a/1", "a", base_version=2, steps=5, samples=160, examples=700, nbytes=40),
    UpdateMeta("b/1", "b", 0, steps=20, samples=480, examples=100, nbytes=40, precision=25 * PRECISION_UNIT),
]


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        ("silo", [1 / 2, 1 / 2]),
        ("examples", [700 / 800, 100 / 800]),
        ("samples", [160 / 640, 480 / 640]),
        ("precision", [700 / 725, 25 / 725]),
    ],
)
def test_a_weighted_mean_shares_in_proportion(by: Share, expected: list[float]) -> None:
    weigher = WeightedMean(by)
    assert weigher.coefficients(METAS, 3) == expected
    assert weigher.coefficients(METAS, 9) == expected, "staleness plays no part"
    assert weigher.coefficients(METAS[:1], 3) == [1.0]
    assert (weigher.weighting, weigher.toward) == (Weighting(by), False)


@pytest.mark.parametrize(
    ("discount", "at_0", "at_2", "at_6"),
    [
        (Constant(), 1.0, 1.0, 1.0),
        (Polynomial(), 1.0, 1 / math.sqrt(3), 1 / math.sqrt(7)),
        (Polynomial(2.0), 1.0, 1 / 9, 1 / 49),
        (Polynomial(0.0), 1.0, 1.0, 1.0),
        (Hinge(slope=0.5, grace=2), 1.0, 1.0, 1 / (1 + 0.5 * 4)),
        (Hinge(slope=10.0, grace=0), 1.0, 1 / 21, 1 / 61),
    ],
)
def test_discounts_by_hand(discount: Discount, at_0: float, at_2: float, at_6: float) -> None:
    assert discount(0) == at_0 == 1.0, "exactly"
    assert discount(2) == pytest.approx(at_2, rel=1e-15)
    assert discount(6) == pytest.approx(at_6, rel=1e-15)
