"""Curves from the orders of silos whose true curve is known."""

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsync.core.orders import WorkReport
from fedsync.core.speed.curve import Curve
from fedsync.core.speed.fitting import CurveBook, CurveFitter, CurvePoint, Fit, fit_curve

AFFINE = Curve(100.0, launch_s=0.5)
BENT = Curve(100.0, launch_s=0.5, saturation=40)
FITTER = CurveFitter()


def learn(true: Curve, sizes: Iterable[int], levels: Iterable[float] | None = None) -> Fit:
    """The fit after orders of these sizes; at level 2 the machine is twice as fast."""
    fit = None
    sizes = list(sizes)
    for size, level in zip(sizes, levels or [1.0] * len(sizes), strict=True):
        fit = FITTER.observe(fit, size, true.step_s(size) / level)
    assert fit is not None
    return fit


def times(curve: Curve, *sizes: int) -> list[float]:
    return [curve.step_s(size) for size in sizes]


def test_one_size_makes_no_curve() -> None:
    """1 s for 50 samples: 50 a second, whatever the size."""
    fit = learn(AFFINE, [50] * 9)
    assert fit.shape == Curve(50.0)
    assert fit.speed == pytest.approx(50.0, rel=1e-12)
    assert fit.at(25.0) == Curve(25.0)


def test_two_sizes_make_a_line_from_the_second_order_on() -> None:
    fit = learn(AFFINE, [50, 100])
    assert times(fit.shape, 10, 50, 100, 300) == pytest.approx(times(AFFINE, 10, 50, 100, 300))
    assert fit.shape.saturation == 0


def test_the_predictor_is_shown_the_speed_at_the_first_size() -> None:
    """50 samples in 1 s, then 100 in 1.5 s: as fast as before, although 67 samples a second."""
    assert learn(AFFINE, [50, 100]).speed == pytest.approx(50.0)
    assert learn(AFFINE, [50, 100, 100, 100, 100], [1, 1, 1, 1, 0.5]).speed == pytest.approx(25.0)


def test_the_forecast_speed_scales_the_whole_shape() -> None:
    """Half the speed at the reference size: all sizes take twice as long."""
    curve = learn(AFFINE, [50, 100]).at(25.0)
    assert times(curve, 10, 50, 100) == pytest.approx([2 * seconds for seconds in times(AFFINE, 10, 50, 100)])


def test_a_bend_needs_three_sizes_of_which_two_lie_above_it() -> None:
    assert times(learn(BENT, [20, 60, 120]).shape, 5, 20, 60, 120, 200) == pytest.approx(
        times(BENT, 5, 20, 60, 120, 200)
    )


def test_a_flat_curve_is_flat_up_to_the_largest_size_seen_and_goes_on_in_proportion() -> None:
    """0.9 s for 10 and for 30 samples; of 60 nothing is known: 1.8 s."""
    assert times(learn(BENT, [10, 30]).shape, 1, 10, 30, 60) == pytest.approx([0.9, 0.9, 0.9, 1.8])


def test_a_line_does_not_begin_below_zero() -> None:
    """Times that grow faster than the size (1 s for 10, 4 s for 20) make no negative launch time."""
    fit = FITTER.observe(FITTER.observe(None, 10, 1.0), 20, 4.0)
    assert fit.shape.launch_s == 0
    assert fit.shape.speed > 0


def test_load_that_comes_during_a_stay_changes_the_level_and_not_the_shape() -> None:
    """Long at 50 and then at 100 samples; in the middle of the second stay the machine halves its speed, and then
    goes to 75 samples: were that shape, 75 samples would take longer than 100.
    """
    sizes, levels = [50] * 5 + [100] * 10 + [75] * 5, [1.0] * 10 + [0.5] * 10
    fit = learn(AFFINE, sizes, levels)
    assert times(fit.shape, 50, 75, 100) == pytest.approx(times(AFFINE, 50, 75, 100))
    assert fit.speed == pytest.approx(25.0)


def test_sizes_that_hardly_differ_are_one_stay() -> None:
    """Between 98 and 102 samples noise would say more than size: a 1 % slip is a launch time of half a second."""
    fit = FITTER.observe(FITTER.observe(None, 100, 1.0), 101, 1.0)
    assert fit.shape.launch_s == 0


def test_what_was_learnt_outlasts_a_long_stay() -> None:
    fit = learn(AFFINE, [50, 100, *[90] * 500])
    assert times(fit.shape, 10, 100) == pytest.approx(times(AFFINE, 10, 100))


def test_of_many_sizes_the_one_not_used_for_longest_is_forgotten() -> None:
    sizes = [2**k for k in range(1, 12)]
    fit = learn(AFFINE, sizes)
    assert len(fit.groups) == FITTER.sizes
    assert {point.batch for points in fit.groups.values() for point in points} == set(sizes[-FITTER.sizes :])


def test_one_wild_order_among_many_hardly_counts() -> None:
    """At 80 samples one order in three took ten times as long."""
    groups = [[CurvePoint(size, AFFINE.step_s(size)) for _ in range(3)] for size in (20, 50, 80, 110)]
    groups[2][1] = CurvePoint(80, 10 * AFFINE.step_s(80))
    curve = fit_curve(groups)
    assert times(curve, 20, 50, 80, 110) == pytest.approx(times(AFFINE, 20, 50, 80, 110), rel=0.02)


@pytest.mark.parametrize("seed", range(5))
def test_noise_of_two_percent_is_averaged_out(seed: int) -> None:
    noise = np.random.default_rng(seed).normal(0.0, 0.02, 60)
    sizes = [50] * 10 + [120] * 10 + [100] * 10 + [110] * 30
    levels = np.exp(noise).tolist()
    curve = learn(AFFINE, sizes, levels).at(50.0)
    assert times(curve, 50, 80, 110, 150) == pytest.approx(times(AFFINE, 50, 80, 110, 150), rel=0.06)


orders = st.tuples(st.integers(1, 4096), st.floats(1e-6, 1e6))


@given(st.lists(orders, min_size=1, max_size=30), st.floats(1e-3, 1e9))
def test_whatever_was_seen_a_machine_can_have_the_curve(seen: list[tuple[int, float]], speed: float) -> None:
    fit = None
    for size, seconds in seen:
        fit = FITTER.observe(fit, size, seconds)
        assert np.isfinite(fit.speed)
        assert fit.speed > 0
        for curve in (fit.shape, fit.at(speed)):
            assert np.isfinite([curve.speed, curve.launch_s, curve.saturation]).all()
            assert curve.speed > 0
            assert curve.launch_s >= 0
            assert curve.saturation >= 0
        assert fit.at(speed).step_s(fit.reference) == pytest.approx(fit.reference / speed)


def report(batch: int, step_s: float) -> WorkReport:
    return WorkReport(base_version=0, steps=4, samples=4 * batch, compute_s=4 * step_s, loss=0.0)


def test_a_book_without_a_fitter_shows_speeds_as_they_are() -> None:
    book = CurveBook()
    assert book.observe("a", report(50, 1.0), order_s=4.0) == 1.0
    assert book.observe("a", report(100, 1.5), order_s=6.0) == 1.0
    assert book.curve("a", 66.0) == Curve(66.0)


def test_a_book_with_a_fitter_turns_speeds_into_those_at_the_reference_size() -> None:
    """100 samples in 1.5 s are 66.7 a second; at 50 it would be 50."""
    book = CurveBook(FITTER)
    assert book.observe("a", report(50, 1.0), order_s=4.0) == 1.0
    assert book.observe("a", report(100, 1.5), order_s=6.0) == pytest.approx(50 / (100 / 1.5))
    assert book.curve("a", 50.0).step_s(200) == pytest.approx(AFFINE.step_s(200))
    assert book.curve("b", 50.0) == Curve(50.0), "of another silo nothing is known"


def test_an_order_that_took_less_than_its_training_has_no_overhead() -> None:
    """Clocks of two machines may disagree by a little."""
    book = CurveBook()
    book.observe("a", report(50, 1.0), order_s=3.9)
    assert book.curve("a", 50.0).overhead_s == 0
