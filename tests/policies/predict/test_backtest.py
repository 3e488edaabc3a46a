"""Errors of recorded forecasts, by hand."""

import pytest

from bench.papers.backtest import Step, backtest
from fedsync.policies.predict.predictor_base import Ema


def test_errors_by_hand() -> None:
    """Memoryless forecasts 10, 20, 40 for steps 2 to 4; warm-up 2: errors 20 and 10, RMSE sqrt(250)."""
    steps = [Step(speed, 0.5, 0.5) for speed in (10.0, 20.0, 40.0, 30.0)]
    watched: list[int] = []
    score = backtest(Ema(1.0), steps, 2, lambda: watched.append(1))
    assert score.forecasts == (10.0, 20.0, 40.0)
    assert score.rmse == pytest.approx(250**0.5)
    assert score.mae == 15.0
    assert len(watched) == 4
