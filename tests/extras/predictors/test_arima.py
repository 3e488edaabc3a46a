"""ARIMA: the filter against statsmodels itself, and what happens where no fit succeeds."""

import numpy as np
import pytest

from fedsync.core.protocols import SpeedSample
from fedsync.extras.predictors.arima import Arima, ArimaState
from fedsync.policies.predict.predictor_base import Ema

SPEEDS = 100 + np.cumsum(np.random.default_rng(2).normal(0, 1, 130))


def seen(arima: Arima, speeds: list[float]) -> ArimaState:
    state = arima.init()
    for speed in speeds:
        state = arima.observe(state, SpeedSample(speed))
    return state


@pytest.mark.slow
def test_it_forecasts_what_statsmodels_forecasts_with_the_same_parameters() -> None:
    """Fitted to 120 speeds, ten more appended: as `append` without a new fit."""
    arima = Arima(d=1, samples=120)
    state = arima.learn(seen(arima, SPEEDS[:120].tolist()), 1)
    unit = SPEEDS[:120].mean()
    from statsmodels.tsa.arima.model import ARIMA  # seconds, for every process that only collects this file

    result = ARIMA(SPEEDS[:120] / unit, order=(2, 1, 1), trend="n").fit(method_kwargs={"maxiter": 30, "disp": 0})
    assert arima.forecast(state) == pytest.approx(result.forecast(1)[0] * unit, rel=1e-6)
    for speed in SPEEDS[120:]:
        state = arima.observe(state, SpeedSample(float(speed)))
    assert not arima.unlearned(state)
    longer = result.append(SPEEDS[120:] / unit, refit=False)
    assert arima.forecast(state) == pytest.approx(longer.forecast(1)[0] * unit, rel=1e-4)


def test_it_is_the_moving_average_before_the_first_fit_and_where_nothing_varies() -> None:
    arima, ema = Arima(samples=60), Ema(0.2)
    average = ema.init()
    for speed in SPEEDS[:50]:
        average = ema.observe(average, SpeedSample(float(speed)))
    assert arima.forecast(seen(arima, SPEEDS[:50].tolist())) == average
    constant = seen(arima, [50.0] * 60)
    assert arima.unlearned(constant)
    constant = arima.learn(constant, 1)
    assert not arima.unlearned(constant), "it does not try again and again"
    assert arima.forecast(constant) == 50.0


def test_a_forecast_stays_within_a_factor_of_what_was_seen_lately() -> None:
    arima = Arima(samples=60)
    state = arima.learn(seen(arima, SPEEDS[:60].tolist()), 1)
    for speed in (60.0, 30.0, 10.0, 1.0):
        state = arima.observe(state, SpeedSample(speed))
    told = arima.forecast(state)
    assert told is not None
    assert told >= 0.5
