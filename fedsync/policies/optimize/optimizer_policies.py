"""Server optimizers: adaptive methods (Reddi et al. 2021) with Flower's defaults, and SCAFFOLD."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge, Gt, Le, Lt

from fedsync.model.cautious_adam import Cautious
from fedsync.model.control_variates import ControlVariates
from fedsync.model.server_optimizer import Adaptive, HeavyBall, ServerOptimizer
from fedsync.policies.schema import Count, Policy, register

Rate = Annotated[float, Gt(0), Le(1e6)]


class ServerOptimizerPolicy(Policy):
    """Base of server optimizers, which turn a commit's weighted sum of updates into a step of the model."""

    section = "server_optimizer"

    controls: ClassVar[bool] = False
    """Whether silos keep control variates, which correct their local steps."""

    rate: Rate
    """Learning rate of the server: factor of each step."""

    @abstractmethod
    def build(self) -> ServerOptimizer: ...


class PacedOptimizerPolicy(ServerOptimizerPolicy):
    """Base of server optimizers that may shorten steps for stale updates."""

    grace: Count | None
    """Staleness up to which an update counts in full, in versions. Above it, the factor of an update is
    ``1 / (1 + s - grace)``; the rate of a commit is multiplied by the mean factor of its updates. Default: staleness
    has no effect."""


Decay = Annotated[float, Ge(0), Lt(1)]
Tau = Annotated[float, Ge(1e-9)]


@register("fedavgm")
@dataclass(frozen=True, slots=True)
class FedAvgM(PacedOptimizerPolicy):
    """Server momentum: each step continues a part of the last step. Hsu et al. 2019."""

    momentum: Decay = 0.9
    """Share of the last step in the next step; ``server_momentum`` in Flower, where it is 0 by default."""

    rate: Rate = 1.0
    """Learning rate of the server: factor of each step; ``server_learning_rate`` in Flower."""

    grace: Count | None = None

    def build(self) -> ServerOptimizer:
        return HeavyBall(self.momentum, self.rate, self.grace)


@register("fedadam")
@dataclass(frozen=True, slots=True)
class FedAdam(PacedOptimizerPolicy):
    """Adam: each value has its own rate, which is lower after larger recent changes. Reddi et al. 2021."""

    rate: Rate = 0.1
    """Learning rate of the server: factor of each step; ``eta`` in Flower."""

    beta_1: Decay = 0.9
    """Share of the mean of changes that is kept in each commit."""

    beta_2: Decay = 0.99
    """Share of the mean of squared changes that is kept in each commit."""

    tau: Tau = 0.001
    """Constant added to the root of the mean of squares, not local steps; larger values make the rates more equal."""

    grace: Count | None = None

    def build(self) -> ServerOptimizer:
        return Adaptive("adam", self.rate, self.beta_1, self.beta_2, self.tau, self.grace)


@register("fedyogi")
@dataclass(frozen=True, slots=True)
class FedYogi(FedAdam):
    """Yogi: as ``fedadam``, but rates rise no faster than they fall when changes become small. Reddi et al. 2021."""

    rate: Rate = 0.01

    beta_2: Decay = 0.99

    def build(self) -> ServerOptimizer:
        return Adaptive("yogi", self.rate, self.beta_1, self.beta_2, self.tau, self.grace)


@register("fedadagrad")
@dataclass(frozen=True, slots=True)
class FedAdagrad(PacedOptimizerPolicy):
    """Adagrad: as ``fedadam`` without forgetting, so that rates only fall. Reddi et al. 2021."""

    rate: Rate = 0.1
    """Learning rate of the server: factor of each step; ``eta`` in Flower."""

    tau: Tau = 0.001
    """Constant added to the root of the sum of squares, not local steps; larger values make the rates more equal."""

    grace: Count | None = None

    def build(self) -> ServerOptimizer:
        return Adaptive("adagrad", self.rate, 0.0, 0.0, self.tau, self.grace)


@register("cautious-adam")
@dataclass(frozen=True, slots=True)
class CautiousAdam(PacedOptimizerPolicy):
    """Adam, scaled by a layer's number of inputs and the number of layers. A value moves only if momentum and newest
    change agree. Suits few local steps. See `fedsync.model.cautious_adam`. Liang et al. 2024, Large et al. 2024."""

    rate: Rate = 0.3
    """Largest joint movement of the layers in a step, relative to the size of their initial weights; grows while most
    values move the same way from commit to commit."""

    growth: Annotated[float, Ge(1), Le(1e6)] = 16.0
    """Largest factor by which the rate grows; 1 fixes the rate."""

    beta_1: Decay = 0.8
    """Share of the mean of changes that is kept in each commit."""

    beta_2: Decay = 0.95
    """Share of the mean of squared changes that is kept in each commit."""

    tau: Tau = 1e-8
    """Constant added to the root of the mean of squares, not local steps; much smaller changes have no effect."""

    grace: Count | None = None
    """As for `fedavgm`. Default: in a model of one layer, the step length is multiplied by the mean over the updates of
    ``1 / sqrt(1 + s)`` for a staleness of s versions."""

    def build(self) -> ServerOptimizer:
        return Cautious("adam", self.rate, self.beta_1, self.beta_2, self.tau, self.grace, growth=self.growth)


@register("scaffold")
@dataclass(frozen=True, slots=True)
class Scaffold(ServerOptimizerPolicy):
    """Control variates against drift between silos with unlike data: each local step is corrected by the difference
    between the gradients of the silo's data and of all silos' data. Karimireddy et al. 2020, option II."""

    rate: Rate = 1.0
    """Learning rate of the server: factor of each step; eta_g in the paper."""

    controls: ClassVar[bool] = True

    def build(self) -> ServerOptimizer:
        return ControlVariates(self.rate)
