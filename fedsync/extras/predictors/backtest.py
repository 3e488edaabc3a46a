"""Backtest of speed predictors: one-step-ahead forecasts of a recorded series, and the reader of the series' file."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from fedsync.common.errors import ConfigError, PolicyError
from fedsync.core.protocols import AnyPredictor, MachineLoad, SpeedSample
from fedsync.core.report_checks import MAX_SPEED, MIN_SPEED

_EPOCHS = 100
_COLUMNS = ("step", "speed", "cpu", "memory")


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
    """Read a trace.

    Raises:
        ConfigError: the trace is invalid; the error names file, line and column.
    """
    try:
        # A spreadsheet may write a byte order mark before the header.
        with path.open(newline="", encoding="utf-8-sig") as file:
            return _steps(file, path)
    except OSError as error:
        raise ConfigError(str(path), error.strerror or str(error), "Name a CSV file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), "not text", "Save it as UTF-8") from error
    except csv.Error as error:
        raise ConfigError(str(path), f"not a CSV file: {error}", "Separate values by commas") from error


def _steps(file: TextIO, path: Path) -> list[Step]:
    reader = csv.reader(file, skipinitialspace=True)
    header = [name.strip().lower() for name in next(reader, [])]
    for name in _COLUMNS:
        if header.count(name) != 1:
            found = "is missing" if name not in header else "is there more than once"
            raise ConfigError(f"{path}, line 1", f"column {name!r} {found}", f"Write {','.join(_COLUMNS)}")
    at = {name: header.index(name) for name in _COLUMNS}
    steps: list[Step] = []
    last = -math.inf
    for row in reader:
        if not any(cell.strip() for cell in row):
            continue
        place = f"{path}, line {reader.line_num}"
        step, speed, cpu, memory = (_number(place, name, row, at[name]) for name in _COLUMNS)
        if step <= last:
            raise ConfigError(f"{place}, column 'step'", f"{step:g} does not follow {last:g}", "Sort by step")
        if not MIN_SPEED <= speed <= MAX_SPEED:
            remedy = f"Write samples per second, from {MIN_SPEED:g} to {MAX_SPEED:g}"
            raise ConfigError(f"{place}, column 'speed'", f"{speed:g}", remedy)
        for name, share in (("cpu", cpu), ("memory", memory)):
            if not 0 <= share <= 1:
                raise ConfigError(f"{place}, column {name!r}", f"{share:g}", "Write a share, from 0 to 1")
        steps.append(Step(speed, cpu, memory))
        last = step
    return steps


def _number(place: str, name: str, row: Sequence[str], index: int) -> float:
    text = row[index].strip() if index < len(row) else ""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"{place}, column {name!r}", f"{text!r} is not a number", "Write a finite number")
    return number
