"""Predictors from an exponential moving average of the speed, and from the newest speed alone."""

from __future__ import annotations

from dataclasses import dataclass

from fedsync.core.protocols import MachineLoad, SpeedSample
from fedsync.policies.predict.predictor_base import PredictorPolicy
from fedsync.policies.schema import Share, register


@register("memoryless")
@dataclass(frozen=True, slots=True)
class Memoryless(PredictorPolicy[float | None]):
    """Forecast that equals the newest speed."""

    def init(self) -> float | None:
        return None

    def observe(self, state: float | None, sample: SpeedSample) -> float:
        return sample.speed

    def forecast(self, state: float | None, drivers: MachineLoad | None = None) -> float | None:
        return state


@register("ema")
@dataclass(frozen=True, slots=True)
class Ema(PredictorPolicy[float | None]):
    """Exponential moving average of the speed: ``f <- alpha v + (1 - alpha) f``, starting with the first speed.

    Source: LB-BSP, sections 3.2.2 and 3.5 (the predictor for federated learning).
    """

    alpha: Share = 0.2
    """Weight of the newest speed; 1 is ``memoryless``."""

    def init(self) -> float | None:
        return None

    def observe(self, state: float | None, sample: SpeedSample) -> float:
        return sample.speed if state is None else self.alpha * sample.speed + (1 - self.alpha) * state

    def forecast(self, state: float | None, drivers: MachineLoad | None = None) -> float | None:
        return state
