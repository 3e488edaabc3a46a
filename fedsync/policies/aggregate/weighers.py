"""Weights of updates in a commit (new version), discounts of stale updates, and base classes of aggregations.

Every weigher returns final coefficients c_i; the model becomes ``model + sum_i c_i update_i``. Published algorithms are
compositions:
- FedAvg: ``WeightedMean("examples")``.
- FedBuff: ``Scaled(Stale(WeightedMean("silo"), s), eta_g)``, that is c_i = eta_g / K * s(staleness_i).
- FedAsync: ``Toward(Scaled(Stale(WeightedMean("silo"), s), alpha))``, that is c = alpha * s(staleness).

The staleness of an update is the number of versions between its base and the version that its commit makes. So a fresh
update has staleness 0 and s(0) = 1. (Published code that counts the commit itself halves a fresh update.)

Source: FedAsync (Xie et al. 2019, arXiv:1903.03934; constant, polynomial, hinge); FedBuff (Nguyen et al. 2022,
arXiv:2106.06639) takes the polynomial discount with exponent 1/2.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar

from fedsync.core.orders import UpdateMeta
from fedsync.core.protocols import Weigher
from fedsync.core.silo_weight import PRECISION_UNIT, Share, Solver, Weighting
from fedsync.policies.schema import Chosen, Count, NonNegative, Policy, register

if TYPE_CHECKING:
    from fedsync.model.commit_updates import Combiner


class Discount(Policy):
    """Factor in (0, 1] that does not grow with staleness."""

    section = "staleness"

    @abstractmethod
    def __call__(self, staleness: int) -> float:
        """Return the factor of an update that is ``staleness`` versions old; 1 at 0."""


def staleness(meta: UpdateMeta, version: int) -> int:
    return version - 1 - meta.base_version


@register("constant")
@dataclass(frozen=True, slots=True)
class Constant(Discount):
    """No discount: a stale update counts as much as a fresh one."""

    def __call__(self, staleness: int) -> float:
        return 1.0


@register("polynomial")
@dataclass(frozen=True, slots=True)
class Polynomial(Discount):
    """Factor ``(1 + s)^-exponent`` for an update that is s versions old."""

    exponent: NonNegative = 0.5
    """Speed at which the weight falls with staleness; 0 gives no discount."""

    def __call__(self, staleness: int) -> float:
        return float((1 + staleness) ** -self.exponent)


@register("hinge")
@dataclass(frozen=True, slots=True)
class Hinge(Discount):
    """Factor 1 up to ``grace`` versions, then ``1 / (1 + slope * (s - grace))``."""

    slope: NonNegative = 10.0
    """Speed at which the weight falls after ``grace``."""

    grace: Count = 4
    """Staleness up to which an update counts in full, in versions."""

    def __call__(self, staleness: int) -> float:
        return 1.0 / (1.0 + self.slope * max(staleness - self.grace, 0))


@dataclass(frozen=True, slots=True)
class WeightedMean:
    """Coefficients in proportion to a share ``by``; they sum to 1.

    - ``silo``: equal shares, for balanced batches on data that differ between silos (LB-BSP, section 3.5).
    - ``examples``: training samples that the silo holds; FedAvg as published.
    - ``samples``: samples processed for the update, for i.i.d. data (LB-BSP, section 3.4, equation 7).
    - ``precision``: training samples, times the share of an update's variance that is not privacy noise; see
      `fedsync.privacy.release.PrivateSettings.precision`.
    """

    by: Share = "silo"

    toward = False

    @property
    def weighting(self) -> Weighting | None:
        return Weighting(self.by)

    def coefficients(self, metas: Sequence[UpdateMeta], version: int) -> Sequence[float]:
        amounts = [self._amount(meta) for meta in metas]
        total = sum(amounts)
        return [amount / total for amount in amounts]

    def _amount(self, meta: UpdateMeta) -> float:
        match self.by:
            case "silo":
                return 1.0
            case "examples":
                return float(meta.examples)
            case "samples":
                return float(meta.samples)
            case "precision":
                return float(meta.precision or PRECISION_UNIT * meta.examples)


@dataclass(frozen=True, slots=True)
class Stale:
    """Discount by the number of versions made since an update's base: c_i s(staleness_i). The lost weight is not given
    to other updates: the model takes a shorter step.
    """

    inner: Weigher
    discount: Discount

    weighting = None
    """None: a silo cannot know how stale its update will be."""

    @property
    def toward(self) -> bool:
        return self.inner.toward

    def coefficients(self, metas: Sequence[UpdateMeta], version: int) -> Sequence[float]:
        fresh = self.inner.coefficients(metas, version)
        return [c * self.discount(staleness(meta, version)) for c, meta in zip(fresh, metas, strict=True)]


@dataclass(frozen=True, slots=True)
class Scaled:
    """Coefficients of ``inner`` times the server's learning rate (eta_g of FedBuff, alpha of FedAsync; positive)."""

    inner: Weigher
    rate: float

    @property
    def weighting(self) -> Weighting | None:
        inner = self.inner.weighting
        return None if inner is None else replace(inner, rate=self.rate * inner.rate)

    @property
    def toward(self) -> bool:
        return self.inner.toward

    def coefficients(self, metas: Sequence[UpdateMeta], version: int) -> Sequence[float]:
        return [self.rate * coefficient for coefficient in self.inner.coefficients(metas, version)]


@dataclass(frozen=True, slots=True)
class Toward:
    """Weigher that moves the model towards the silos' models instead of along their updates; see `Commit`.

    The model keeps the share ``1 - sum_i c_i`` of itself. With one update and coefficient a, this is FedAsync's ``x =
    (1 - a) x + a x_silo``, which undoes part of the commits made since the silo's base.

    Source: FedAsync (Xie et al. 2019, arXiv:1903.03934), Algorithm 1.
    """

    inner: Weigher

    weighting = None
    """None: the model is needed in the clear."""
    toward = True

    def coefficients(self, metas: Sequence[UpdateMeta], version: int) -> Sequence[float]:
        return self.inner.coefficients(metas, version)


Staleness = Annotated[Discount, Chosen("staleness")]


class AggregationPolicy(Policy):
    """Base of aggregations, which weigh the updates of a commit."""

    section = "aggregation"

    @property
    def normalises(self) -> bool:
        """Whether each update is divided by its silo's progress, which must then be defined."""
        return False

    @property
    def discounts(self) -> bool:
        return False

    additive: ClassVar[bool] = True
    """Whether a server that can only add could aggregate, apart from a discount."""

    def combiner(self) -> Combiner | None:
        """Return a new combiner per run, which computes the change from unencrypted updates; None to add them up."""
        return None

    @abstractmethod
    def weigher(self, solver: Solver) -> Weigher:
        """Return the weigher, which gives a commit's updates their coefficients, for silos with this local solver."""


class DiscountedPolicy(AggregationPolicy):
    """Base of aggregations that may discount stale updates."""

    staleness: Staleness
    """Discount of updates that began with an older version."""

    @property
    def discounts(self) -> bool:
        return not isinstance(self.staleness, Constant)

    def _discounted(self, inner: Weigher, rate: float) -> Weigher:
        fading = Stale(inner, self.staleness) if self.discounts else inner
        return fading if rate == 1 else Scaled(fading, rate)
