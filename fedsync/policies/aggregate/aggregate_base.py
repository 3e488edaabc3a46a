"""Base classes of all aggregations, with the properties that the rest of the system reads."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, ClassVar

from fedsync.core.protocols import Weigher
from fedsync.core.weighting import Solver
from fedsync.policies.aggregate.weighers import Constant, Discount, Scaled, Stale
from fedsync.policies.schema import Chosen, Policy

if TYPE_CHECKING:
    from fedsync.policies.aggregate.combining import Combiner

Staleness = Annotated[Discount, Chosen("staleness")]


class AggregationPolicy(Policy):
    """Base of aggregations, which weigh the updates of a commit; defaults hold for most aggregations."""

    section = "aggregation"

    @property
    def normalises(self) -> bool:
        """Whether each update is divided by its silo's progress, which must then be defined."""
        return False

    @property
    def discounts(self) -> bool:
        """Whether stale updates count less with these settings."""
        return False

    additive: ClassVar[bool] = True
    """Whether a server that can only add could aggregate, apart from a discount."""

    @property
    def least_updates(self) -> int:
        """Fewest updates of a commit with which the aggregation serves its purpose."""
        return 1

    def combiner(self) -> Combiner | None:
        """Return a new combiner per run, which derives the change from single updates, or None to add them up.

        A combiner needs updates in the clear.
        """
        return None

    @abstractmethod
    def weigher(self, solver: Solver) -> Weigher:
        """Return the weigher, which gives the updates of a commit their coefficients, for silos that train so."""


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
