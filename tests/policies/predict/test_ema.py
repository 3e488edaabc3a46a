"""The exponential moving average, by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsync.core.protocols import SpeedSample
from fedsync.policies.predict.predictor_base import Ema


def forecasts(predictor: Ema, speeds: list[float]) -> list[float | None]:
    state, told = predictor.init(), []
    for speed in speeds:
        state = predictor.observe(state, SpeedSample(speed))
        told.append(predictor.forecast(state))
    return told


def test_nothing_is_known_before_the_first_order() -> None:
    assert Ema().forecast(Ema().init()) is None


@pytest.mark.parametrize(
    ("alpha", "speeds", "expected"),
    [
        (0.5, [100, 200, 50], [100, 150, 100]),  # (100 + 200) / 2 = 150, (150 + 50) / 2 = 100
        (0.2, [100, 200, 200], [100, 120, 136]),  # 100 + 20, 120 + 0.2 x 80
        (0.25, [80, 40, 0.001], [80, 70, 52.50025]),
        (1.0, [100, 200, 50], [100, 200, 50]),  # memoryless
    ],
)
def test_forecasts_by_hand(alpha: float, speeds: list[float], expected: list[float]) -> None:
    assert forecasts(Ema(alpha), speeds) == pytest.approx(expected, rel=1e-14)


def test_resources_play_no_part() -> None:
    ema = Ema(0.5)
    state = ema.observe(None, SpeedSample(100.0))
    assert ema.observe(state, SpeedSample(50.0, cpu=0.9, memory=0.1)) == ema.observe(state, SpeedSample(50.0))


@pytest.mark.parametrize(("alpha", "jobs"), [(0.2, 11), (0.5, 4)])
def test_how_soon_it_believes_that_a_machine_is_twice_as_fast(alpha: float, jobs: int) -> None:
    """The gap shrinks by 1 - alpha an order; it is under a tenth after log(0.1) / log(1 - alpha) of them."""
    assert jobs == math.ceil(math.log(0.1) / math.log(1 - alpha))
    told = forecasts(Ema(alpha), [100.0] + [200.0] * jobs)
    assert [speed is not None and speed > 190 for speed in told].index(True) == jobs


@given(st.floats(0.001, 1.0), st.lists(st.floats(1e-6, 1e9), min_size=1, max_size=20))
def test_a_forecast_lies_between_the_slowest_and_the_fastest_seen(alpha: float, speeds: list[float]) -> None:
    last = forecasts(Ema(alpha), speeds)[-1]
    assert last is not None
    assert min(speeds) * (1 - 1e-12) <= last <= max(speeds) * (1 + 1e-12)
