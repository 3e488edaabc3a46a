"""Columns of numbers: what is constant up to rounding is no reason to blow anything up."""

import numpy as np
import pytest
from numpy.typing import NDArray

from fedsync.tasks.features import standardised


def encoded(cells: list[str], train: int) -> NDArray[np.float64]:
    """Features of one column of numbers, of which the first so many rows are to train on."""
    return standardised(np.array([np.nan if cell == "?" else float(cell) for cell in cells]), np.arange(train))


@pytest.mark.parametrize("constant", ["0.1", "37.2", "-0.3", "5", "0", "1e9", "1e-300"])
@pytest.mark.parametrize("train", [3, 7, 10])
def test_a_constant_is_zero_though_binary_numbers_cannot_hold_it(constant: str, train: int) -> None:
    """The deviation of ten times 0.1 is 1.4e-17: divided by it, a test row of 0.2 would be 7e15."""
    other = float(constant) + 1.5
    features = encoded([constant] * train + [constant, "?", str(other)], train)
    assert not features[: train + 2].any(), "a test row with the constant, or imputed with it, is zero too"
    assert features[-1] == pytest.approx(1.5)


def test_a_small_deviation_that_is_no_rounding_counts() -> None:
    """1000000 +- 1 has a deviation of 1, a millionth of the mean."""
    np.testing.assert_allclose(encoded(["999999", "1000001", "1000003"], 2), [-1, 1, 3])
