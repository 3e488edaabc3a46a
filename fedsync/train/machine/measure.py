"""A machine's curve: how long a local step takes, by batch size. Measured with the loop that trains."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter

from fedsync.common.errors import ConfigError
from fedsync.core.cursor import Cursor
from fedsync.core.orders import WorkOrder
from fedsync.core.speed.curve import Curve
from fedsync.core.speed.fitting import CurvePoint, fit_curve
from fedsync.train.loop import Trainer
from fedsync.train.machine.resources import machine_memory_share

_ORDER_S = 0.05
"""An order is given as many steps as fill this time: neither the clock nor a reading of the probe shows then."""

_MOST_STEPS = 200
_FULL = 0.9
"""Share of the machine's memory in use from which on no larger batch is tried."""

_LEARNING_RATE = 1e-9
"""Nothing is to be learned; a rate at which nothing can diverge."""


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Steps of one size.

    Args:
        batch: samples a step.
        steps: steps an order.
        seconds: a step, mean of each order; without the first, which warms up.
    """

    batch: int
    steps: int
    seconds: tuple[float, ...] = ()

    @property
    def step_s(self) -> float:
        """Median seconds of a step."""
        return median(self.seconds)


@dataclass(frozen=True, slots=True)
class Measurement:
    """What was measured on a machine.

    Args:
        timings: by ascending size.
        memory_samples: largest batch that fits its memory, or None if none was too large.
    """

    timings: tuple[StepTiming, ...]
    memory_samples: int | None

    def fit(self) -> Curve:
        """The curve ``max(c, a + b x)`` that is closest to the times; a line through the origin for one size."""
        groups = [[CurvePoint(timing.batch, seconds) for seconds in timing.seconds] for timing in self.timings]
        if len(groups) == 1:
            return Curve(self.timings[0].batch / self.timings[0].step_s)
        return fit_curve(groups)


Watch = Callable[[int, float], None]
"""Told the batch size that is tried next, and which share of the time is gone, 0..1."""


def sizes_up_to(most: int) -> list[int]:
    """1, 2, 4 and so on, and ``most`` itself."""
    return [*(2**power for power in range(most.bit_length()) if 2**power < most), most]


def measure(trainer: Trainer, limit_s: float, repeats: int = 9, watch: Watch | None = None) -> Measurement:
    """Time steps over batches of 1, 2, 4 and so on, up to the data or the memory.

    First each size is tried once, which warms up; sizes stop growing when a third of the time is gone. Then
    all sizes get their turn again and again: a machine that is busy for a while is so for all of them.

    Args:
        trainer: of this machine.
        limit_s: stop after about so many seconds, but not before each size was timed once.
        repeats: timings of a size, at most.
        watch: told of the progress.

    Raises:
        ConfigError: there are too few samples for the model.
        RuntimeError: one single sample does not fit the memory.
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
            # The second one counts: the first has memory to allocate, and kernels to choose.
            step_s = [_step_s(trainer, batch, steps)[0] for steps in (1, 2)][1]
            fitting = _step_s(trainer, batch, 1)[1]
        except ValueError:
            if batch > 1:
                raise
            continue  # batch normalisation wants two samples
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
    """Mean seconds of a step, with the device synchronised, and the batch cap that the trainer ran into."""
    order = WorkOrder("probe", 0, 1, batch, steps, _LEARNING_RATE, seed=0, evaluate=False)
    report = trainer.run(order, trainer.initial_model(), Cursor()).report
    return report.compute_s / report.steps, report.batch_cap
