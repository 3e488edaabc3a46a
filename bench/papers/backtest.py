"""Backtest of speed predictors: errors of each predictor's one-step-ahead forecasts of a recorded series.

    python bench/papers/backtest.py trace.csv [--warmup 500]

The file has a row for each step, and the columns speed [samples/s], cpu and memory (shares in use, 0..1).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.common import print_table
from fedsync.common.errors import PolicyError
from fedsync.core.protocols import AnyPredictor, MachineLoad, SpeedSample
from fedsync.policies.predict.predictor_base import predictors

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


def read_trace(path: Path) -> list[Step]:
    """Read a CSV file with the columns speed, cpu and memory, in any order; other columns are ignored."""
    table = np.atleast_1d(np.genfromtxt(path, delimiter=",", names=True))
    return [Step(float(row["speed"]), float(row["cpu"]), float(row["memory"])) for row in table]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    trace = Path("bench/results/real_trace.csv")
    parser.add_argument("trace", type=Path, nargs="?", default=trace, help="CSV file; by default that of real_trace.py")
    parser.add_argument("--warmup", type=int, default=500, help="steps that do not count, 1 or more")
    options = parser.parse_args()
    steps = read_trace(options.trace)
    if not 1 <= options.warmup < len(steps):
        parser.error(f"the trace has {len(steps)} steps; give --warmup between 1 and {len(steps) - 1}")
    scores = {kind: backtest(known, steps, options.warmup) for kind, known in predictors().items()}
    ema = scores["ema"].rmse
    rows = [[kind, f"{s.rmse:.4g}", f"{s.mae:.4g}", f"{s.rmse / ema:.3f}"] for kind, s in scores.items()]
    print_table(f"{len(steps)} steps", ["predictor", "RMSE", "MAE", "RMSE / EMA's"], rows)


if __name__ == "__main__":
    main()
