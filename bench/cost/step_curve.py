"""Measurement of a machine's speed curve (seconds of a local step by batch size), with the real training loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter

from fedsync.common.errors import ConfigError
from fedsync.core.orders import Cursor, WorkOrder
from fedsync.core.speed.curve import Curve
from fedsync.core.speed.fitting import CurvePoint, fit_curve
from fedsync.train.loop import Trainer
from fedsync.train.machine.resources import machine_memory_share

_ORDER_S = 0.05
"""Time that the steps of an order should fill, long enough to make clock and probe errors negligible."""

_MOST_STEPS = 200
_FULL = 0.9
"""Share of the machine's memory in use above which no larger batch is tried."""

_LEARNING_RATE = 1e-9
"""Learning rate so small that training cannot diverge; nothing needs to be learned."""


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Timings of one ``batch`` size [samples], ``steps`` an order: mean ``seconds`` of a step, without warm-up."""

    batch: int
    steps: int
    seconds: tuple[float, ...] = ()

    @property
    def step_s(self) -> float:
        return median(self.seconds)


@dataclass(frozen=True, slots=True)
class Measurement:
    """Result of a machine's measurement: timings by ascending size, and the largest batch that fits the memory."""

    timings: tuple[StepTiming, ...]
    memory_samples: int | None

    def fit(self) -> Curve:
        """Fit the curve ``max(c, a + b x)`` to the times; for a single size, a line through the origin."""
        groups = [[CurvePoint(timing.batch, seconds) for seconds in timing.seconds] for timing in self.timings]
        if len(groups) == 1:
            return Curve(self.timings[0].batch / self.timings[0].step_s)
        return fit_curve(groups)


Watch = Callable[[int, float], None]
"""Progress callback: batch size to be tried next, and elapsed share of the time, 0..1."""


def sizes_up_to(most: int) -> list[int]:
    return [*(2**power for power in range(most.bit_length()) if 2**power < most), most]


def measure(trainer: Trainer, limit_s: float, repeats: int = 9, watch: Watch | None = None) -> Measurement:
    """Time steps over batches of 1, 2, 4 and so on, up to the number of samples or the memory limit.

    Each size is tried once as a warm-up; sizes stop growing after a third of the time ``limit_s``. Then all sizes are
    timed in turn, up to ``repeats`` times, so that a temporary load of the machine affects all sizes alike. Raises
    `ConfigError` if there are too few samples for the model, and `RuntimeError` if a single sample does not fit.
    """
    begin_s = perf_counter()

    def gone() -> float:
        return (perf_counter() - begin_s) / limit_s

    def look(batch: int) -> None:
        if watch is not None:
            watch(batch, min(gone(), 1.0))

    cap = trainer.find_batch_cap(limit_s / 6) if trainer.device != "cpu" else None
    timings: list[StepTiming] = []
    for batch in sizes_up_to(cap or trainer.examples):
        look(batch)
        try:
            # The second order counts: the first also allocates memory and selects kernels.
            step_s = [_step_s(trainer, batch, steps)[0] for steps in (1, 2)][1]
            fitting = _step_s(trainer, batch, 1)[1]
        except ValueError:
            if batch > 1:
                raise
            continue  # batch normalisation needs at least two samples
        if fitting is not None and fitting < batch:
            cap = fitting
            break
        timings.append(StepTiming(batch, min(max(math.ceil(_ORDER_S / step_s), 1), _MOST_STEPS)))
        if len(timings) > 1 and (gone() > 1 / 3 or (trainer.device == "cpu" and machine_memory_share() > _FULL)):
            break
    if not timings:
        raise ConfigError("task", "its model cannot be trained on a single sample, and there are no more", "Give more")
    for repeat in range(repeats):
        for index, timing in enumerate(timings):
            if repeat and gone() >= 1:
                break
            look(timing.batch)
            step_s, _ = _step_s(trainer, timing.batch, timing.steps)
            timings[index] = replace(timing, seconds=(*timing.seconds, step_s))
    return Measurement(tuple(timings), cap)


def _step_s(trainer: Trainer, batch: int, steps: int) -> tuple[float, int | None]:
    """Mean time of a step [s], with the device synchronised, and the batch cap if memory ran out."""
    order = WorkOrder("probe", 0, 1, batch, steps, _LEARNING_RATE, seed=0, evaluate=False)
    report = trainer.run(order, trainer.initial_model(), Cursor()).report
    return report.compute_s / report.steps, report.batch_cap
