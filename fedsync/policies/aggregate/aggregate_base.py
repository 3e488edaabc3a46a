"""What every aggregation has that a strategy file may choose, and what others must know of it."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated

from fedsync.core.protocols import Weigher
from fedsync.core.weighting import Solver
from fedsync.policies.aggregate.staleness import Constant, Discount
from fedsync.policies.aggregate.weighers import Scaled, Stale
from fedsync.policies.schema import Chosen, Policy

if TYPE_CHECKING:
    from fedsync.policies.aggregate.combining import Combiner

Staleness = Annotated[Discount, Chosen("staleness")]


class AggregationPolicy(Policy):
    """Base of aggregations: how a commit weighs its updates.

    The properties are true of most aggregations; one of which they are not overrides them.
    """

    __slots__ = ()
    section = "aggregation"

    @property
    def normalises(self) -> bool:
        """Whether an update is divided by its silo's progress, which must exist then."""
        return False

    @property
    def discounts(self) -> bool:
        """Whether a stale update counts less, as configured."""
        return False

    @property
    def additive(self) -> bool:
        """Whether a server that can only add could do it, were there no discount."""
        return True

    @property
    def least_updates(self) -> int:
        """Updates that a commit needs for the aggregation to do what it is for."""
        return 1

    def combiner(self) -> Combiner | None:
        """What makes the change of a commit by looking at its updates, a new one for each run; None to add them up.

        Only in the clear.
        """
        return None

    @abstractmethod
    def weigher(self, solver: Solver) -> Weigher:
        """What gives the updates of a commit their coefficients.

        Args:
            solver: how silos train.
        """


class DiscountedPolicy(AggregationPolicy):
    """Base of those that may let a stale update count less."""

    __slots__ = ()
    staleness: Staleness
    """How much less an update counts that began with an older version."""

    @property
    def discounts(self) -> bool:
        return not isinstance(self.staleness, Constant)

    def _discounted(self, inner: Weigher, rate: float) -> Weigher:
        """``inner`` with stale updates discounted, times ``rate``."""
        fading = Stale(inner, self.staleness) if self.discounts else inner
        return fading if rate == 1 else Scaled(fading, rate)
