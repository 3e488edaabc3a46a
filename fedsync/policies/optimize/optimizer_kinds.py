"""The optimizers of Reddi et al. 2021 with the defaults of Flower's strategies, delayed Nesterov, and SCAFFOLD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge, Lt

from fedsync.model.cautious_adam import Cautious
from fedsync.model.control_variates import ControlVariates
from fedsync.model.server_optimizer import Adaptive, Delayed, HeavyBall, ServerOptimizer
from fedsync.policies.optimize.optimizer_base import PacedOptimizerPolicy, Rate, ServerOptimizerPolicy
from fedsync.policies.schema import Count, NonNegative, PositiveInt, register

Decay = Annotated[float, Ge(0), Lt(1)]
Tau = Annotated[float, Ge(1e-9)]


@register("fedavgm")
@dataclass(frozen=True, slots=True)
class FedAvgM(PacedOptimizerPolicy):
    """Momentum: each step goes on with a part of the last one. Hsu et al. 2019."""

    momentum: Decay = 0.9
    """Part of the last step that the next one goes on with; ``server_momentum`` in Flower, where it is 0 by default."""

    rate: Rate = 1.0
    """What a step is multiplied by; ``server_learning_rate`` in Flower."""

    grace: Count | None = None

    def build(self) -> ServerOptimizer:
        return HeavyBall(self.momentum, self.rate, self.grace)


@register("fedadam")
@dataclass(frozen=True, slots=True)
class FedAdam(PacedOptimizerPolicy):
    """Adam: each value has a rate of its own, the lower the larger its changes have lately been. Reddi et al. 2021."""

    rate: Rate = 0.1
    """What a step is multiplied by; ``eta`` in Flower."""

    beta_1: Decay = 0.9
    """How much of the mean of changes is kept in each commit."""

    beta_2: Decay = 0.99
    """How much of the mean of their squares is kept in each commit."""

    tau: Tau = 0.001
    """Added to the root of that mean: the larger, the less rates differ. Not the local steps of a silo."""

    grace: Count | None = None

    def build(self) -> ServerOptimizer:
        return Adaptive("adam", self.rate, self.beta_1, self.beta_2, self.tau, self.grace)


@register("fedyogi")
@dataclass(frozen=True, slots=True)
class FedYogi(PacedOptimizerPolicy):
    """As ``fedadam``, with rates that rise no faster than they fall where changes become small. Reddi et al. 2021."""

    rate: Rate = 0.01
    """What a step is multiplied by; ``eta`` in Flower."""

    beta_1: Decay = 0.9
    """How much of the mean of changes is kept in each commit."""

    beta_2: Decay = 0.99
    """How slowly the mean of their squares moves."""

    tau: Tau = 0.001
    """Added to the root of that mean: the larger, the less rates differ. Not the local steps of a silo."""

    grace: Count | None = None

    def build(self) -> ServerOptimizer:
        return Adaptive("yogi", self.rate, self.beta_1, self.beta_2, self.tau, self.grace)


@register("fedadagrad")
@dataclass(frozen=True, slots=True)
class FedAdagrad(PacedOptimizerPolicy):
    """Adagrad: as ``fedadam`` without forgetting, so that rates only fall. Reddi et al. 2021."""

    rate: Rate = 0.1
    """What a step is multiplied by; ``eta`` in Flower."""

    tau: Tau = 0.001
    """Added to the root of the sum of squares: the larger, the less rates differ. Not the local steps of a silo."""

    grace: Count | None = None

    def build(self) -> ServerOptimizer:
        return Adaptive("adagrad", self.rate, 0.0, 0.0, self.tau, self.grace)


@register("cautious-adam")
@dataclass(frozen=True, slots=True)
class CautiousAdam(PacedOptimizerPolicy):
    """Adam with a rate that suits models of many widths and depths, and steps only where momentum and the newest
    change agree. Goes with few local steps. See `fedsync.model.cautious_adam`. Liang et al. 2024, Large et al. 2024."""

    rate: Rate = 0.3
    """How far the layers together may move in a step, as a share of how large their weights are at first."""

    beta_1: Decay = 0.8
    """How much of the mean of changes is kept in each commit."""

    beta_2: Decay = 0.95
    """How much of the mean of their squares is kept in each commit."""

    tau: Tau = 1e-8
    """Added to the root of that mean: changes far below it count for nothing. Not the local steps of a silo."""

    grace: Count | None = None
    """As for `fedavgm`; but left out, steps of a model of one layer are ``1 / sqrt(1 + s)`` as long along updates that
    are s versions old, in the mean over them."""

    def build(self) -> ServerOptimizer:
        return Cautious("adam", self.rate, self.beta_1, self.beta_2, self.tau, self.grace)


@register("delayed-nesterov")
@dataclass(frozen=True, slots=True)
class DelayedNesterov(PacedOptimizerPolicy):
    """Nesterov's momentum for strategies that commit each arrival: renewed and applied every few commits, between which
    the model moves by the updates alone. Liu et al. 2024."""

    momentum: Decay = 0.9
    """Part of the last momentum that the next one goes on with."""

    every: PositiveInt = 5
    """Commits from one renewal to the next: about the number of silos, where ``server_rate`` is one over it."""

    spread: NonNegative = 0.0
    """Part of the momentum that each commit applies, ahead of the next renewal, at most one over ``every``; c in the
    paper. 0 applies all of it at once."""

    rate: Rate = 1.0
    """What a step is multiplied by."""

    grace: Count | None = None

    def __post_init__(self) -> None:
        if self.spread * self.every > 1:
            raise ValueError(f"spread {self.spread:g} exceeds one over every ({self.every}); lower it")

    def build(self) -> ServerOptimizer:
        return Delayed(self.momentum, self.every, self.spread, self.rate, self.grace)


@register("scaffold")
@dataclass(frozen=True, slots=True)
class Scaffold(ServerOptimizerPolicy):
    """Corrects each local step by how the gradients of the silo's data differ from all silos', so that silos with
    unlike data do not drift apart: control variates. Karimireddy et al. 2020, option II."""

    rate: Rate = 1.0
    """What a step is multiplied by; eta_g in the paper."""

    controls: ClassVar[bool] = True

    def build(self) -> ServerOptimizer:
        return ControlVariates(self.rate)
