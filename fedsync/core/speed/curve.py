"""Time model of a silo: seconds of a local step or an order, and the number of steps in a time budget."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of one local step as a function of batch size, plus the overhead of an order.

    A step takes ``launch_s + max(batch, saturation) / speed``, which is ``max(c, a + b x)``. With launch_s and
    saturation 0 it is the linear curve of CPU silos; otherwise the affine curve of accelerators, flat up to saturation.

    Args:
        speed: samples per second once saturated (v).
        launch_s: constant seconds a step.
        saturation: batch size below which a step gets no shorter [samples].
        overhead_s: seconds of an order besides its steps: encryption, transfer, evaluation.

    Source: LB-BSP, sections 3.1 (whole time of a round), 3.2.1 (linear) and 3.3.1 (affine).
    """

    speed: float
    launch_s: float = 0.0
    saturation: float = 0
    overhead_s: float = 0.0

    def step_s(self, batch_size: float) -> float:
        return self.launch_s + max(batch_size, self.saturation) / self.speed

    def order_s(self, batch_size: float, steps: int) -> float:
        return self.overhead_s + steps * self.step_s(batch_size)

    def scaled(self, factor: float) -> Curve:
        """Return the curve of a machine whose steps take ``factor`` times as long; the overhead stays."""
        return Curve(self.speed / factor, self.launch_s * factor, self.saturation, self.overhead_s)

    def spread(self, steps: int) -> Curve:
        """Return the curve whose step takes ``order_s / steps``: each step carries its part of the overhead."""
        return Curve(self.speed, self.launch_s + self.overhead_s / steps, self.saturation)

    def of_steps(self, batch_size: int) -> Curve:
        """Return a curve over local steps instead of samples: ``step_s(k)`` is ``order_s(batch_size, k)``."""
        return Curve(1.0 / self.step_s(batch_size), self.overhead_s)

    def of_multiples(self, multiple: int) -> Curve:
        """Return a curve over multiples instead of samples: ``step_s(k)`` is this curve's ``step_s(k * multiple)``."""
        return Curve(self.speed / multiple, self.launch_s, self.saturation / multiple, self.overhead_s)


def may_begin(elapsed_s: float, step_s: float, budget_s: float, overrun: float) -> bool:
    """Return whether a step may begin: before the budget ends, and exceeding it by at most ``overrun`` of the step.

    Source: FSP, section 3.1 (a worker that is signalled within a step decides whether to finish it).
    """
    left_s = budget_s - elapsed_s
    return left_s > 0 and left_s >= (1 - overrun) * step_s


def steps_within(seconds: NDArray[np.float64], budget_s: float, overrun: float) -> int:
    """Return the number of steps of these lengths, float64 [k], k >= 1, that fit a budget; at least 1."""
    left_s = budget_s - (np.cumsum(seconds) - seconds)
    stays_out = ~((left_s > 0) & (left_s >= (1 - overrun) * seconds))
    return max(int(np.argmax(stays_out)) if stays_out.any() else len(seconds), 1)
