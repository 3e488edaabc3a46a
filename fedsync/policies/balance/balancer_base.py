"""Base classes of balancers (choice of batch sizes) and speed curves; kinds ``fixed``, ``linear`` and ``affine``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from fedsync.core.orders import LocalWork
from fedsync.core.protocols import Bounds
from fedsync.core.speed.curve import Curve
from fedsync.core.speed.fitting import CurveFitter
from fedsync.core.speed.sizing import Scale, Sizing
from fedsync.policies.balance.rounding import InMultiples
from fedsync.policies.schema import Chosen, PartOfOne, Policy, PositiveInt, register


class BalancerPolicy(Policy):
    """Base of balancers, which set the amount of work of each silo."""

    section = "balancer"

    @property
    def declared(self) -> bool:
        """Whether silos declare their speeds, instead of measured and forecast speeds."""
        return False

    @property
    def scales_steps(self) -> bool:
        return False

    @property
    def scales_rates(self) -> bool:
        return False

    needs_lockstep: ClassVar[bool] = False
    """Whether the balancer needs rounds in which all silos do the same number of steps."""

    spends: ClassVar[bool] = False
    """Whether batch sizes follow the silos' privacy budgets."""

    @property
    def named(self) -> Mapping[str, object]:
        """Settings of single silos, by silo name."""
        return {}

    def check(self, batch_size: int) -> None:
        """Raise `ValueError` if a mean batch of ``batch_size`` is impossible."""

    @abstractmethod
    def sizing(self, work: LocalWork) -> Sizing:
        """Return the conversion of forecasts into work; ``work`` is the mean work of a silo."""


@register("fixed")
@dataclass(frozen=True, slots=True)
class FixedBalancer(BalancerPolicy):
    """Equal work for every silo: FedAvg."""

    def sizing(self, work: LocalWork) -> Sizing:
        return Sizing(work)


class CurvePolicy(Policy):
    """Base of models of the time of a step as a function of its batch."""

    section = "curve"

    @abstractmethod
    def fitter(self) -> CurveFitter | None:
        """Return the learner of the curves; None if only the speed is learned."""


@register("linear")
@dataclass(frozen=True, slots=True)
class LinearCurve(CurvePolicy):
    """Time of a step in proportion to its batch."""

    def fitter(self) -> None:
        return None


@register("affine")
@dataclass(frozen=True, slots=True)
class AffineCurve(CurvePolicy):
    """Time of a step as ``max(c, a + b x)``, learned for each silo from its past batch sizes."""

    def fitter(self) -> CurveFitter:
        return CurveFitter()


@dataclass(frozen=True, slots=True)
class SharingBalancer(BalancerPolicy):
    """Base of balancers that share a total among the silos."""

    floor: PositiveInt = 1
    """Smallest batch of a silo [samples]."""

    cap: PositiveInt | None = None
    """Largest batch of a silo [samples]. Default: no limit."""

    multiple: PositiveInt = 1
    """Number of which batch sizes are multiples, where bounds allow: for tensor cores and compiled graphs."""

    curve: Annotated[CurvePolicy, Chosen("curve")] = field(default_factory=AffineCurve)
    """Model of the time of a step as a function of its batch."""

    def check(self, batch_size: int) -> None:
        if self.floor > batch_size:
            raise ValueError(f"balancer.floor {self.floor} exceeds local.batch_size {batch_size}")
        if self.cap is not None and self.cap < batch_size:
            raise ValueError(
                f"balancer.cap {self.cap} lies below local.batch_size {batch_size}: "
                "the silos could not take the total together"
            )
        least = -(-self.floor // self.multiple) * self.multiple
        most = self.cap and self.cap // self.multiple * self.multiple
        if batch_size in (least, most) and not self.scales_steps:
            which, way = ("largest", "more") if batch_size == most else ("smallest", "less")
            raise ValueError(
                f"local.batch_size {batch_size} is the {which} batch that the balancer may give: no silo could get "
                f"{way}, so nothing would be balanced; change it, or take balancer.kind: fixed"
            )
        if batch_size % self.multiple:
            above = -(-batch_size // self.multiple) * self.multiple
            raise ValueError(
                f"balancer.multiple {self.multiple} does not divide local.batch_size {batch_size}: multiples could not "
                f"sum to the total; write local.batch_size: {above}, or another multiple"
            )


@dataclass(frozen=True, slots=True)
class ForecastBalancer(SharingBalancer):
    """Base of balancers that share a total by forecasts; see `fedsync.core.protocols.Balancer`."""

    scale: Literal["batch", "steps", "learning_rate"] = "batch"
    """Quantity that follows the speed of a silo: ``batch`` size, number of local ``steps``, or ``learning_rate``."""

    speeds: Literal["measured", "declared"] = "measured"
    """Source of speeds: ``measured`` and forecast by the predictor, or ``declared`` by silos, with linear curves."""

    gradient_noise: PartOfOne = 0.3
    """Share of rounds that is due to noisy gradients, if batches are equal. Gradients of small batches are noisier and
    can cost rounds, so beside a long overhead batches are more even than speeds. 0: as the speeds, as in the paper.
    Counts as 0 for declared speeds, another ``scale``, updates weighed by samples, and rounds that do not wait for all
    silos."""

    def __post_init__(self) -> None:
        if self.scales_steps and self.multiple > 1:
            raise ValueError("balancer.multiple has no effect: balancer.scale 'steps' keeps batch sizes")

    @property
    def declared(self) -> bool:
        return self.speeds == "declared"

    @property
    def scales_steps(self) -> bool:
        return self.scale == "steps"

    @property
    def scales_rates(self) -> bool:
        return self.scale == "learning_rate"

    @abstractmethod
    def plan(self, curves: Sequence[Curve], total: int, bounds: Bounds) -> NDArray[np.int64]:
        """Sizes, int64 [n] in samples, within bounds and summing to ``total``, for the predicted curves of n silos.

        Raises `ConfigError` if the bounds cannot hold ``total``, and `ValueError` for a curve that is not finite, or a
        speed that is not positive.
        """

    def sizing(self, work: LocalWork) -> Sizing:
        return Sizing(
            work,
            self if self.multiple == 1 else InMultiples(self, self.multiple),
            Scale(self.scale),
            self.floor,
            self.cap,
            fitter=None if self.declared else self.curve.fitter(),
            noise=0.0 if self.declared or self.scale != "batch" else self.gradient_noise,
        )
