"""Backtest of a predictor: one-step-ahead forecasts of a recorded series."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedsync.common.errors import PolicyError
from fedsync.core.protocols import AnyPredictor, MachineLoad, SpeedSample

_EPOCHS = 100


@dataclass(frozen=True, slots=True)
class Step:
    """Step of a recorded series: speed [samples/s], and the shares of cpu and memory, 0..1."""

    speed: float
    cpu: float
    memory: float


@dataclass(frozen=True, slots=True)
class BacktestErrors:
    """Errors over the steps after the warm-up [samples/s]; ``forecasts`` covers every step but the first."""

    rmse: float
    mae: float
    forecasts: tuple[float, ...]


def backtest(
    predictor: AnyPredictor, steps: Sequence[Step], warmup: int, watch: Callable[[], None] = lambda: None
) -> BacktestErrors:
    """Forecast each step, with its cpu and memory as drivers, before its speed is observed; ``watch`` is called after
    each.

    Due training runs to its end after each step, in no simulated time. The first ``warmup`` steps, 1 or more, do not
    count.
    """
    state = predictor.init()
    told: list[float] = []
    for number, step in enumerate(steps):
        known = MachineLoad(step.cpu, step.memory)
        speed = predictor.forecast(state, known)
        if number > 0:
            if speed is None or not (math.isfinite(speed) and speed > 0):
                raise PolicyError(f"the predictor forecasts a speed of {speed} samples/s")
            told.append(speed)
        state = predictor.observe(state, SpeedSample(step.speed, step.cpu, step.memory, known=known))
        while predictor.unlearned(state):
            state = predictor.learn(state, _EPOCHS)
        watch()
    errors = [abs(speed - step.speed) for speed, step in zip(told[warmup - 1 :], steps[warmup:], strict=True)]
    return BacktestErrors(
        rmse=math.sqrt(sum(error * error for error in errors) / len(errors)),
        mae=sum(errors) / len(errors),
        forecasts=tuple(told),
    )
