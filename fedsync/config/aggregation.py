"""The kinds of aggregation that exist, and what each can be told."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedsync.config.section import Section
from fedsync.config.training import NonNegative
from fedsync.core.protocols import Weigher
from fedsync.core.weighting import Solver
from fedsync.policies.aggregate.fednova import FedNova
from fedsync.policies.aggregate.staleness import Constant, Discount, Hinge, Polynomial
from fedsync.policies.aggregate.weighers import Scaled, Stale, Toward, WeightedMean

Rate = Annotated[float, Field(gt=0)]
Part = Annotated[float, Field(gt=0, le=1)]
Weight = Literal["silo", "examples", "samples"]


class ConstantConfig(Section):
    """A stale update counts as much as a fresh one."""

    kind: Literal["constant"]

    def build(self) -> Discount:
        """The function."""
        return Constant()


class PolynomialConfig(Section):
    """``(1 + s)^-exponent`` for an update that is s versions old."""

    kind: Literal["polynomial"]
    exponent: NonNegative = 0.5
    """How fast the weight falls; 0 does not discount."""

    def build(self) -> Discount:
        """The function."""
        return Polynomial(self.exponent)


class HingeConfig(Section):
    """1 up to ``grace`` versions, then ``1 / (1 + slope * (s - grace))``."""

    kind: Literal["hinge"]
    slope: NonNegative = 10.0
    """How fast the weight falls after ``grace``."""

    grace: Annotated[int, Field(ge=0)] = 4
    """Versions up to which an update counts in full."""

    def build(self) -> Discount:
        """The function."""
        return Hinge(self.slope, self.grace)


StalenessConfig = Annotated[ConstantConfig | PolynomialConfig | HingeConfig, Field(discriminator="kind")]


def _constant() -> StalenessConfig:
    return ConstantConfig(kind="constant")


def _polynomial() -> StalenessConfig:
    return PolynomialConfig(kind="polynomial")


class FedAvgConfig(Section):
    """Weighted mean of the updates."""

    kind: Literal["fedavg"]
    weight: Weight = "silo"
    """What an update counts by: ``silo`` all the same, ``examples`` by the samples its silo holds, ``samples`` by those
    processed."""

    def build(self, solver: Solver) -> Weigher:
        """The policy."""
        return WeightedMean(self.weight)


class FedNovaConfig(Section):
    """Weighted mean of the updates, each divided by its silo's own progress: for unequal numbers of steps.

    Progress follows from the steps, from momentum, learning rate and proximal term of ``local``, and from the task.
    """

    kind: Literal["fednova"]
    weight: Weight = "silo"
    """What an update counts by: ``silo`` all the same, ``examples`` by the samples its silo holds, ``samples`` by those
    processed."""

    server_rate: Rate = 1.0
    """The commit's step is multiplied by it."""

    staleness: StalenessConfig = Field(default_factory=_constant)
    """How much less an update counts that began with an older version."""

    def build(self, solver: Solver) -> Weigher:
        """The policy."""
        mean = FedNova(WeightedMean(self.weight), solver.momentum, solver.pull)
        return _scaled(_stale(mean, self.staleness), self.server_rate)


class FedBuffConfig(Section):
    """``server_rate`` times the mean of the updates, each discounted by its staleness."""

    kind: Literal["fedbuff"]
    server_rate: Rate = 1.0
    """The commit's step is multiplied by it."""

    staleness: StalenessConfig = Field(default_factory=_polynomial)
    """How much less an update counts that began with an older version."""

    def build(self, solver: Solver) -> Weigher:
        """The policy."""
        return _scaled(_stale(WeightedMean("silo"), self.staleness), self.server_rate)


class FedAsyncConfig(Section):
    """The model becomes a mixture of itself and the silo's whole model."""

    kind: Literal["fedasync"]
    mixing: Part = 0.6
    """Share of the silo's model in the mixture, where it is fresh."""

    staleness: StalenessConfig = Field(default_factory=_polynomial)
    """How much less an update counts that began with an older version."""

    def build(self, solver: Solver) -> Weigher:
        """The policy."""
        return Toward(_scaled(_stale(WeightedMean("silo"), self.staleness), self.mixing))


AggregationConfig = Annotated[
    FedAvgConfig | FedNovaConfig | FedBuffConfig | FedAsyncConfig, Field(discriminator="kind")
]


def _stale(inner: Weigher, staleness: StalenessConfig) -> Weigher:
    discount = staleness.build()
    return inner if isinstance(discount, Constant) else Stale(inner, discount)


def _scaled(inner: Weigher, rate: float) -> Weigher:
    return inner if rate == 1 else Scaled(inner, rate)
