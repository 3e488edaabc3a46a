"""Base class of all predictors of a silo's speed, and the predictors ``memoryless`` and ``ema``."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar, cast

from annotated_types import Ge, Le

from fedsync.core.protocols import MachineLoad, SpeedSample
from fedsync.policies.schema import Policy, Share, kinds, register

S = TypeVar("S")

Hidden = Annotated[int, Ge(1), Le(64)]
Memory = Annotated[int, Ge(50), Le(10_000)]


class PredictorPolicy(Policy, Generic[S]):
    """Base of predictors of a silo's speed in its next order; see `fedsync.core.protocols.Predictor`. A predictor that
    does not train keeps the defaults of all training methods.
    """

    section = "predictor"

    @property
    def learns(self) -> bool:
        return False

    @abstractmethod
    def init(self) -> S: ...

    @abstractmethod
    def observe(self, state: S, sample: SpeedSample) -> S: ...

    @abstractmethod
    def forecast(self, state: S, drivers: MachineLoad | None = None) -> float | None: ...

    def unlearned(self, state: S) -> bool:
        return False

    def learn(self, state: S, epochs: int) -> S:
        return state

    def reuse(self, state: S, donor: S) -> S:
        return state

    def promise(self, state: S) -> float | None:
        """Squared error of the trained model relative to the moving average's, on held-out samples; None if unknown."""
        return None


def predictors() -> dict[str, PredictorPolicy[Any]]:
    return {kind: cast(PredictorPolicy[Any], policy()) for kind, policy in kinds("predictor").items()}


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
class Ema(Memoryless):
    """Exponential moving average of the speed: ``f <- alpha v + (1 - alpha) f``, starting with the first speed.

    Source: LB-BSP, sections 3.2.2 and 3.5 (the predictor for federated learning).
    """

    alpha: Share = 0.2
    """Weight of the newest speed; 1 is ``memoryless``."""

    def observe(self, state: float | None, sample: SpeedSample) -> float:
        return sample.speed if state is None else self.alpha * sample.speed + (1 - self.alpha) * state
