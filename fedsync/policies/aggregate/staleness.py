"""Discounts of stale updates.

The staleness of an update is the number of versions made between its base and its commit, without the version of that
commit. An update that starts from the newest model has s = 0, and every discount is then exactly 1. (Published code
that counts the commit itself discounts a fresh update by one half.)

Source: FedAsync (Xie et al. 2019, arXiv:1903.03934; constant, polynomial, hinge); FedBuff (Nguyen et
al. 2022, arXiv:2106.06639) takes the polynomial discount with exponent 1/2.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from fedsync.core.orders import UpdateMeta
from fedsync.policies.schema import Count, NonNegative, Policy, register


class Discount(Policy):
    """Factor in (0, 1] that does not grow with staleness."""

    __slots__ = ()
    section = "staleness"

    @abstractmethod
    def __call__(self, staleness: int) -> float:
        """Return the factor of an update that is ``staleness`` versions old; 1 at 0."""


def staleness(meta: UpdateMeta, version: int) -> int:
    """Versions made since the update's base, without ``version``, which the commit makes; 0 is fresh."""
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
