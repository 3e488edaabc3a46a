"""Emulation of slow machines on a fast machine, for benchmarks and demonstrations."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedsync.common.errors import ConfigError
from fedsync.core.speed.curve import Curve


@dataclass(frozen=True, slots=True)
class Throttle:
    """Extra time that stretches local steps to the duration on an emulated machine.

    A step over b samples lasts ``max(curve.step_s(b), raw_s * fastest_ratio)`` seconds: the emulated duration, unless
    this machine is too slow for it; then all silos slow down together. ``fastest_ratio`` is the speed of the fastest
    emulated silo divided by this silo's; `ConfigError` below 1.
    """

    curve: Curve
    fastest_ratio: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.fastest_ratio) and self.fastest_ratio >= 1):
            raise ConfigError(
                "emulate.fastest_ratio",
                f"{self.fastest_ratio} is below 1",
                "Divide the fastest silo's speed by this one's",
            )

    def sleep_s(self, batch_size: int, raw_s: float) -> float:
        """Seconds to add to a step over ``batch_size`` samples that took ``raw_s`` seconds; never negative."""
        return max(self.curve.step_s(batch_size), raw_s * self.fastest_ratio) - raw_s
