"""What every balancer has that a strategy file may choose, and what others must know of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray

from fedsync.core.orders import LocalWork
from fedsync.core.protocols import Bounds
from fedsync.core.speed.curve import Curve
from fedsync.core.speed.fitting import CurveFitter
from fedsync.core.speed.sizing import Scale, Sizing
from fedsync.policies.balance.multiples import InMultiples
from fedsync.policies.schema import Chosen, Policy, PositiveInt, register


class BalancerPolicy(Policy):
    """Base of balancers: how much work each silo gets."""

    __slots__ = ()
    section = "balancer"

    @property
    def declared(self) -> bool:
        """Whether speeds are what silos declare, not what is measured and forecast."""
        return False

    @property
    def scales_steps(self) -> bool:
        """Whether it sets numbers of steps instead of batch sizes."""
        return False

    @property
    def scales_rates(self) -> bool:
        """Whether silos get learning rates that differ."""
        return False

    @property
    def needs_lockstep(self) -> bool:
        """Whether it needs rounds in which all silos do the same steps."""
        return False

    def check(self, batch_size: int) -> None:
        """Check that silos can do with ``batch_size`` in the mean.

        Raises:
            ValueError: they cannot.
        """

    @abstractmethod
    def sizing(self, work: LocalWork) -> Sizing:
        """What turns forecasts into work, where ``work`` is what silos do in the mean."""


@register("fixed")
@dataclass(frozen=True, slots=True)
class FixedBalancer(BalancerPolicy):
    """Every silo does the same work: FedAvg."""

    def sizing(self, work: LocalWork) -> Sizing:
        return Sizing(work)


class CurvePolicy(Policy):
    """Base of how the time of a step is taken to follow its batch."""

    __slots__ = ()
    section = "curve"

    @abstractmethod
    def fitter(self) -> CurveFitter | None:
        """What learns the curves; None if nothing is to be learnt but the speed."""


@register("linear")
@dataclass(frozen=True, slots=True)
class LinearCurve(CurvePolicy):
    """The time of a step is taken to be in proportion to its batch."""

    def fitter(self) -> None:
        return None


@register("affine")
@dataclass(frozen=True, slots=True)
class AffineCurve(CurvePolicy):
    """The time of a step is ``max(c, a + b x)``, learnt for each silo from the batch sizes that it was given."""

    def fitter(self) -> CurveFitter:
        return CurveFitter()


@dataclass(frozen=True, slots=True)
class SharingBalancer(BalancerPolicy):
    """Base of balancers that share a total."""

    floor: PositiveInt = 1
    """Smallest batch a silo may get [samples]."""

    cap: PositiveInt | None = None
    """Largest batch a silo may get [samples]."""

    multiple: PositiveInt = 1
    """Batch sizes are multiples of it, where bounds allow: for tensor cores and compiled graphs."""

    curve: Annotated[CurvePolicy, Chosen("curve")] = field(default_factory=AffineCurve)
    """How the time of a step is taken to follow its batch."""

    def check(self, batch_size: int) -> None:
        if self.floor > batch_size:
            raise ValueError(f"balancer.floor {self.floor} exceeds local.batch_size {batch_size}")
        if self.cap is not None and self.cap < batch_size:
            raise ValueError(
                f"balancer.cap {self.cap} lies below local.batch_size {batch_size}: "
                "the silos could not take the total together"
            )
        least = -(-self.floor // self.multiple) * self.multiple
        if batch_size in (least, self.cap) and not self.scales_steps:
            which, way = ("largest", "more") if batch_size == self.cap else ("smallest", "less")
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
    """What the shares set."""

    speeds: Literal["measured", "declared"] = "measured"
    """Measured, and forecast by the predictor; or as the silos declare them, with linear curves."""

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
        """Sizes, int64 [n] in samples, ``bounds.floor <= sizes <= bounds.cap``, summing to ``total``.

        Args:
            curves: one predicted curve a silo, n of them.
            total: samples to share (X).
            bounds: smallest and largest size of each silo.

        Raises:
            ConfigError: the bounds cannot hold ``total``.
            ValueError: a curve is not finite, or its speed not positive.
        """

    def sizing(self, work: LocalWork) -> Sizing:
        return Sizing(
            work,
            self if self.multiple == 1 else InMultiples(self, self.multiple),
            Scale(self.scale),
            self.floor,
            self.cap,
            fitter=None if self.declared else self.curve.fitter(),
            certain=self.declared,
        )
