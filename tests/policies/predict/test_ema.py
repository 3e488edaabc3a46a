"""The exponential moving average, by hand."""

import math

import pytest

from fedsync.core.protocols import SpeedSample
from fedsync.policies.predict.predictor_base import Ema


def forecasts(predictor: Ema, speeds: list[float]) -> list[float | None]:
    state, told = predictor.init(), []
    for speed in speeds:
        state = predictor.observe(state, SpeedSample(speed))
        told.append(predictor.forecast(state))
    return told


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
