"""The kinds of policies that exist, and what each can be told. A kind not listed here does not exist."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedsync.aggregate.weighers import ByExamples, BySamples, BySilo
from fedsync.balance.proportional import ProportionalBalancer
from fedsync.config.barriers import BspConfig
from fedsync.config.section import Section
from fedsync.core.protocols import AnyPredictor, Balancer, Weigher
from fedsync.predict.ema import Ema

Share = Annotated[float, Field(gt=0, le=1)]
PositiveInt = Annotated[int, Field(ge=1)]


class MemorylessConfig(Section):
    """Tomorrow is as today."""

    kind: Literal["memoryless"]

    def build(self) -> AnyPredictor:
        """The policy."""
        return Ema(alpha=1.0)


class EmaConfig(Section):
    """Exponential moving average of the speed; ``alpha`` weighs the newest."""

    kind: Literal["ema"]
    alpha: Share = 0.2

    def build(self) -> AnyPredictor:
        """The policy."""
        return Ema(self.alpha)


PredictorConfig = Annotated[MemorylessConfig | EmaConfig, Field(discriminator="kind")]


class FixedConfig(Section):
    """Every silo does the same work: FedAvg."""

    kind: Literal["fixed"]

    def build(self) -> Balancer | None:
        """The policy: nothing is shared."""
        return None


class ProportionalConfig(Section):
    """Work in proportion to predicted speed; what a cap cuts off is shared among the others."""

    kind: Literal["proportional"]
    scale: Literal["batch", "steps", "learning_rate"] = "batch"
    speeds: Literal["measured", "declared"] = "measured"
    floor: PositiveInt = 1
    cap: PositiveInt | None = None

    def build(self) -> Balancer | None:
        """The policy."""
        return ProportionalBalancer()


BalancerConfig = Annotated[FixedConfig | ProportionalConfig, Field(discriminator="kind")]


# One kind so far: a union of one has no discriminator.
BarrierConfig = BspConfig

_WEIGHERS: dict[str, type[BySilo] | type[ByExamples] | type[BySamples]] = {
    "silo": BySilo,
    "examples": ByExamples,
    "samples": BySamples,
}


class FedAvgConfig(Section):
    """Weighted mean of the updates."""

    kind: Literal["fedavg"]
    weight: Literal["silo", "examples", "samples"] = "silo"

    def build(self) -> Weigher:
        """The policy."""
        return _WEIGHERS[self.weight]()


AggregationConfig = FedAvgConfig


class PlainConfig(Section):
    """No encryption: the server sees every update."""

    kind: Literal["plain"]


CipherConfig = PlainConfig
