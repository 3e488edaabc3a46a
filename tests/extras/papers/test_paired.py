"""Means over seeds and paired tests, against numbers worked out by hand or in closed form."""

from math import sqrt

import pytest

from fedsync.extras.papers.paired import PairedTest, SeedMean, corrected, paired


def test_the_interval_of_a_mean_is_students() -> None:
    """1, 2, 3: deviation 1; with 2 degrees of freedom the 97.5 % quantile is 4.302653."""
    found = SeedMean.of([1.0, 2.0, 3.0])
    assert (found.mean, found.low, found.high) == pytest.approx((2.0, 2 - 4.302653 / sqrt(3), 2 + 4.302653 / sqrt(3)))
    assert SeedMean.of([0.5]) == SeedMean(0.5, None, None, 1)


def test_pairs_are_runs_of_one_seed() -> None:
    """Differences 1, 2, 3: t = 2 sqrt(3), and with 2 degrees of freedom p = 1 - t / sqrt(2 + t^2). Ranks: 2 / 2^3."""
    first = {7: 0.0, 8: 0.0, 9: 0.0, 10: 5.0}
    found = paired(first, {9: 3.0, 8: 2.0, 7: 1.0, 11: 9.0})
    t = 2 * sqrt(3)
    assert found.pairs == 3
    assert found.difference is not None and found.difference.mean == pytest.approx(2.0)
    assert found.t == pytest.approx(1 - t / sqrt(2 + t * t))
    assert found.wilcoxon == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("second", "why"),
    [({}, "0 pairs"), ({1: 1.0, 2: 2.0}, "2 pairs; a test needs 3"), ({1: 0.0, 2: 0.0, 3: 0.0}, "all differences are")],
)
def test_what_cannot_be_tested_says_why(second: dict[int, float], why: str) -> None:
    found = paired({1: 0.0, 2: 0.0, 3: 0.0}, second)
    assert why in found.why
    assert found.t is found.wilcoxon is None


def test_differences_that_only_rounding_tells_apart_are_not_tested() -> None:
    """One more correct prediction of 100 with each seed: 0.46 - 0.45 and 0.91 - 0.90 differ in the last bits."""
    found = paired({1: 0.90, 2: 0.45, 3: 0.11}, {1: 0.91, 2: 0.46, 3: 0.12})
    assert (found.t, found.why) == (None, "all differences are the same")


def test_holm_corrects_for_all_comparisons() -> None:
    """By hand: 0.01 x 3, then 0.02 x 2 = 0.04, then 0.03 x 1, which is raised to 0.04."""
    tests = [PairedTest(5, None, value) for value in (0.03, None, 0.01, 0.02)]
    assert [test.holm for test in corrected(tests)] == [pytest.approx(0.04), None, pytest.approx(0.03), 0.04]
    assert corrected([PairedTest(5, None, 0.7), PairedTest(5, None, 0.9)])[0].holm == 1.0
