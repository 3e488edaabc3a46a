"""Exponential moving average of a silo's speed."""

from __future__ import annotations

from dataclasses import dataclass

from fedsync.core.protocols import Drivers, SpeedSample
from fedsync.policies.predict.plain import Plain


@dataclass(frozen=True, slots=True)
class Ema(Plain[float | None]):
    """Forecast ``f <- alpha v + (1 - alpha) f``, beginning with the first speed seen.

    Args:
        alpha: weight of the newest speed, in (0, 1]; 1 is memoryless.

    Source: LB-BSP, sections 3.2.2 and 3.5 (the predictor for federated learning).
    """

    alpha: float = 0.2

    def init(self) -> float | None:
        """Nothing seen yet."""
        return None

    def observe(self, state: float | None, sample: SpeedSample) -> float | None:
        """Average after one more speed [samples/s]."""
        return sample.speed if state is None else self.alpha * sample.speed + (1 - self.alpha) * state

    def forecast(self, state: float | None, drivers: Drivers | None = None) -> float | None:
        """The average [samples/s], or None before the first observation."""
        return state
