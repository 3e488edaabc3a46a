"""The arithmetic of NARX by hand."""

import math

import numpy as np
import pytest

from fedsync.core.orders import Window
from fedsync.core.protocols import SpeedSample
from fedsync.extras.predictors.narx import (
    Model,
    _corrected,
    _fold,
    _follow,
    _judged,
    _normal,
    _rows,
    _table,
    average_error,
)
from fedsync.extras.predictors.small_network import Training, outputs

ROWS = np.array([[1.0, 0.1, 0.4], [2.0, 0.2, 0.5], [3.0, 0.3, 0.6], [5.0, 0.7, 0.8]])


def summing(gain: float, limit: float) -> Model:
    """A model that forecasts the sum of the last two speeds."""
    straight = np.array([1.0, 1.0, 0, 0, 0, 0, 0, 0])
    none = np.zeros((1, 8))
    return Model(np.empty(0), none, np.zeros(1), np.zeros(1), straight, 0.0, gain, limit, 0.0, 100.0)


def test_rows_are_windows_or_the_sample_itself() -> None:
    assert _rows(SpeedSample(7.0, 0.5, None)).tolist() == [[7.0, 0.5, 0.0]]
    assert _rows(SpeedSample(7.0)).tolist() == [[7.0, 0.0, 0.0]]
    windows = (Window(8.0, None, 0.25), Window(9.0, 0.5))
    assert _rows(SpeedSample(7.0, windows=windows)).tolist() == [[8.0, 0.0, 0.25], [9.0, 0.5, 0.0]]


def test_a_row_of_the_table_is_two_speeds_before_and_three_of_cpu_and_memory() -> None:
    x, y = _table(ROWS)
    assert x.tolist() == [[2.0, 1.0, 0.3, 0.2, 0.1, 0.6, 0.5, 0.4], [3.0, 2.0, 0.7, 0.3, 0.2, 0.8, 0.6, 0.5]]
    assert y.tolist() == [3.0, 5.0]


def test_inputs_are_scaled_by_their_spread_and_what_does_not_vary_by_its_size() -> None:
    x = np.array([[1.0, 5.0, 4.0, 0.0], [3.0, 9.0, 4.0, 0.0]])
    mean, scale = _normal(x)
    assert mean.tolist() == [2.0, 2.0, 4.0, 0.0]  # the second has the first's
    assert scale.tolist() == [1.0, 1.0, 4.0, 1e-3]


def test_the_error_of_the_average_over_what_is_held_out() -> None:
    """1, 1.0, 1.2 are the averages before 1, 2, 4: of the last two the errors are 1 and 2.8."""
    assert average_error(np.array([1.0, 2.0, 4.0]), 2) == pytest.approx((1.0 + 2.8**2) / 2)


def test_the_correction_follows_the_error_by_its_gain_within_its_limit() -> None:
    """Errors 1, 0.75 and 2.5, each moving it by half of at most 0.5; the last two are held out."""
    squares, after = _follow(np.ones(3), np.array([2.0, 2.0, 4.0]), 0.5, 0.5, 2)
    assert (squares, after) == ((0.75**2 + 2.5**2) / 2, 0.75)
    squares, after = _follow(np.ones(2), np.array([0.0, 0.9]), 0.5, 0.5, 2)
    assert (squares, after) == pytest.approx(((1.0 + 0.15**2) / 2, -0.25 + 0.075))


def test_new_windows_correct_as_training_would_have() -> None:
    """3 and 5 are forecast as 3 and 5; 4 and 4.5, with half again, as errors of 1 and 0."""
    rows = np.array([[1.0, 0, 0], [2.0, 0, 0], [4.0, 0, 0], [6.5, 0, 0]])
    assert _corrected(summing(0.5, 9.0), 0.0, rows) == 0.5 + 0.5 * (6.5 - 6.0 - 0.5)
    assert _corrected(summing(0.5, 0.2), 0.25, rows) == pytest.approx(0.25 + 0.1 + 0.5 * (0.5 - 0.35))
    assert _corrected(summing(0.0, 9.0), 7.0, rows) == 0.0


def test_one_error_counts_up_to_nine_times_the_larger_mean() -> None:
    assert _judged((1.0, 4.0), 2.0, 10.0) == pytest.approx((1.0 + 0.02 * (4.0 - 1.0), 4.0 + 0.02 * (36.0 - 4.0)))
    assert _judged((0.0, 0.0), 3.0, 10.0) == pytest.approx((0.02 * 9.0, 0.02 * 100.0))


def test_the_folded_model_gives_in_units_what_the_network_gives_in_scales() -> None:
    draw = np.random.default_rng(2)
    x = draw.normal(50.0, 10.0, size=(40, 8))
    y = draw.normal(50.0, 10.0, size=40)
    mean, scale = _normal(x)
    training = Training(x, y, x, y, 3, draw.normal(size=3 * 10 + 9))
    model = _fold(training, mean, scale, y)
    expected = outputs(training.parameters, 3, (x - mean) / scale)[0] * scale[0] + mean[0]
    np.testing.assert_allclose(model.speeds(x), expected)
    assert model.speed(x[0].tolist()) == pytest.approx(expected[0])
    low, high = np.quantile(y, [0.005, 0.995])
    assert (model.low, model.high) == (low / 1.5, high * 1.5)
    assert (model.gain, model.limit) == (0.0, 0.0)
    best = _fold(Training(x, y, x, y, 3, training.parameters, best=np.zeros(39)), mean, scale, y)
    np.testing.assert_allclose(best.speeds(x), mean[0])  # a network of zeros says the mean
    assert math.isfinite(best.low)
