"""How long a silo takes for a batch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of one local step as a function of its batch size.

    ``launch_s + max(batch, saturation) / speed``: with both extras at zero it is the linear curve of
    CPU silos, ``t = x / v``; with them it is the affine curve of accelerators, flat until the device
    is saturated.

    Args:
        speed: samples per second once saturated (v).
        launch_s: constant seconds a step.
        saturation: batch size below which a step gets no shorter [samples].

    Source: LB-BSP, sections 3.2.1 (linear) and 3.3.1 (affine).
    """

    speed: float
    launch_s: float = 0.0
    saturation: int = 0

    def step_s(self, batch_size: int) -> float:
        """Seconds of one step over ``batch_size`` samples."""
        return self.launch_s + max(batch_size, self.saturation) / self.speed
