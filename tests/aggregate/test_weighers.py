"""What each update counts."""

from __future__ import annotations

import pytest

from fedsync.aggregate.weighers import Share, WeightedMean
from fedsync.core.orders import UpdateMeta

METAS = [
    UpdateMeta("a/1", "a", base_version=2, steps=5, samples=160, examples=700, nbytes=40),
    UpdateMeta("b/1", "b", base_version=0, steps=20, samples=480, examples=100, nbytes=40),
]


@pytest.mark.parametrize(
    ("by", "expected"),
    [("silo", [1 / 2, 1 / 2]), ("examples", [700 / 800, 100 / 800]), ("samples", [160 / 640, 480 / 640])],
)
def test_a_weighted_mean_shares_in_proportion(by: Share, expected: list[float]) -> None:
    weigher = WeightedMean(by)
    assert weigher.coefficients(METAS, 3) == expected
    assert weigher.coefficients(METAS, 9) == expected, "staleness plays no part"
    assert weigher.coefficients(METAS[:1], 3) == [1.0]
    assert (weigher.linear, weigher.toward) == (True, False)
