"""What each update counts."""

import math

import pytest

from fedsync.core.orders import UpdateMeta
from fedsync.core.silo_weight import Share, Weighting
from fedsync.policies.aggregate.weighers import (
    Constant,
    Discount,
    Hinge,
    Polynomial,
    Scaled,
    Stale,
    Toward,
    WeightedMean,
)

METAS = [
    UpdateMeta("a/1", "a", base_version=2, steps=5, samples=160, examples=700, nbytes=40),
    UpdateMeta("b/1", "b", base_version=0, steps=20, samples=480, examples=100, nbytes=40, precision=25 * 64),
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


def test_fedbuff_is_eta_by_k_times_the_discount() -> None:
    """eta_g = 0.9, K = 2, s = 0 and 2: 0.9 / 2 and 0.9 / 2 / sqrt(3)."""
    weigher = Scaled(Stale(WeightedMean("silo"), Polynomial()), 0.9)
    assert weigher.coefficients(METAS, 3) == pytest.approx([0.45, 0.45 / math.sqrt(3)])
    assert (weigher.weighting, weigher.toward) == (None, False)
    assert Scaled(Scaled(WeightedMean("samples"), 0.5), 0.5).weighting == Weighting("samples", rate=0.25)


def test_fedasync_s_mixing_does_not_compound() -> None:
    """Asked a hundred times, a fresh update still gets alpha, and one of staleness 2 alpha / 3."""
    weigher = Toward(Scaled(Stale(WeightedMean("silo"), Polynomial(1.0)), 0.6))
    for _ in range(100):
        assert weigher.coefficients(METAS[1:], 3) == pytest.approx([0.6 / 3])
    assert weigher.coefficients(METAS[:1], 3) == [0.6]
    assert (weigher.weighting, weigher.toward) == (None, True)
    assert (Stale(weigher, Constant()).toward, Scaled(weigher, 0.5).toward) == (True, True)
