"""The level with change points, by hand."""

import math

import pytest

from fedsync.core.protocols import SpeedSample
from fedsync.extras.predictors.kalman import Kalman, KalmanState


def observe(kalman: Kalman, state: KalmanState | None, log_speed: float) -> KalmanState:
    after = kalman.observe(state, SpeedSample(math.exp(log_speed)))
    assert after is not None
    return after


def test_one_step_by_hand() -> None:
    """P + Q = 0.03 + 0.5 x 0.02 = 0.04, S = 0.06, K = 2/3; z = 0.3, z^2 = 0.09 = 1.5 S, so R <- R (1 + 0.05 x 0.5)."""
    after = observe(Kalman(drift=0.5, gate=3.0), KalmanState(1.0, 0.03, 0.02), 1.3)
    assert after.level == pytest.approx(1.0 + 2 / 3 * 0.3)
    assert after.variance == pytest.approx(0.04 / 3)
    assert after.noise == pytest.approx(0.0205)
    assert after.suspect is None


@pytest.mark.parametrize("side", [1, -1], ids=["faster", "slower"])
def test_one_measurement_far_out_changes_no_forecast_and_two_are_a_change(side: int) -> None:
    kalman, state = Kalman(), KalmanState(1.0, 1e-4, 1e-4)
    spike = observe(kalman, state, 1.0 + side)
    assert kalman.forecast(spike) == kalman.forecast(state)
    assert observe(kalman, spike, 1.0).level == pytest.approx(1.0)
    other_side = observe(kalman, spike, 1.0 - side)
    assert (other_side.level, other_side.suspect) == (1.0, pytest.approx(1.0 - side)), "to either side: no change"
    changed = observe(kalman, spike, 1.0 + 1.2 * side)
    assert changed.level == pytest.approx(1.0 + 1.1 * side)
    assert changed.variance == pytest.approx(changed.noise / 2)


def test_noise_that_lasts_opens_the_gate() -> None:
    """Alternating by 0.5 about the level, at first far outside: R grows until such measurements are believed."""
    kalman, state = Kalman(), KalmanState(1.0, 1e-6, 1e-6)
    for order in range(200):
        state = observe(kalman, state, 1.0 + (0.5 if order % 2 else -0.5))
    assert state.suspect is None
    assert state.noise > 0.5**2 / 9 / 2
