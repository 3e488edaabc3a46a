"""The kinds of policies that exist, and what each can be told. A kind not listed here does not exist."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedsync.balance.proportional import ProportionalBalancer
from fedsync.config.barriers import (
    AbspConfig,
    AspConfig,
    BspConfig,
    ElasticConfig,
    FspConfig,
    SampledConfig,
    SspConfig,
)
from fedsync.config.local import PositiveInt
from fedsync.config.peers import BufferedConfig, CappedConfig, CompassConfig, DeadlineConfig, QuorumConfig
from fedsync.config.section import Section
from fedsync.core.protocols import AnyPredictor, Balancer
from fedsync.predict.ema import Ema

Share = Annotated[float, Field(gt=0, le=1)]


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


BarrierConfig = Annotated[
    BspConfig  # the papers'
    | AspConfig
    | SspConfig
    | SampledConfig
    | FspConfig
    | AbspConfig
    | ElasticConfig
    | BufferedConfig  # the peers'
    | CompassConfig
    | CappedConfig  # around any other
    | QuorumConfig
    | DeadlineConfig,
    Field(discriminator="kind"),
]
# What a wrapper holds is any barrier, a wrapper too: it could not be named before it was there.
for wrapper in (CappedConfig, QuorumConfig, DeadlineConfig):
    wrapper.model_rebuild(_types_namespace={"BarrierConfig": BarrierConfig})


class PlainConfig(Section):
    """No encryption: the server sees every update."""

    kind: Literal["plain"]


CipherConfig = PlainConfig
