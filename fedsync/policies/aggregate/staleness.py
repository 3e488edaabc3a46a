"""How much less a stale update counts.

The staleness of an update is the number of versions made between its base and the commit that takes it, that
commit not counted: an update that starts from the newest model is fresh, s = 0, and every discount of it is
exactly 1. (Published code that counts the commit itself discounts a fresh update by one half.)

Source: FedAsync (Xie et al. 2019, arXiv:1903.03934; constant, polynomial, hinge); FedBuff (Nguyen et
al. 2022, arXiv:2106.06639) takes the polynomial one with exponent 1/2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from fedsync.core.orders import UpdateMeta


class Discount(Protocol):
    """A factor in (0, 1] that does not grow with staleness."""

    def __call__(self, staleness: int) -> float:
        """Factor of an update that is ``staleness`` versions old; 1 at 0."""
        ...


def staleness(meta: UpdateMeta, version: int) -> int:
    """Versions made since the update's base, without ``version``, which the commit makes; 0 is fresh."""
    return version - 1 - meta.base_version


@dataclass(frozen=True, slots=True)
class Constant:
    """1, however stale."""

    def __call__(self, staleness: int) -> float:
        """1."""
        return 1.0


@dataclass(frozen=True, slots=True)
class Polynomial:
    """``(1 + s)^-a``.

    Args:
        exponent: a, at least 0.
    """

    exponent: float = 0.5

    def __call__(self, staleness: int) -> float:
        """``(1 + s)^-a``."""
        return float((1 + staleness) ** -self.exponent)


@dataclass(frozen=True, slots=True)
class Hinge:
    """1 up to a staleness of b, then ``1 / (1 + a (s - b))``.

    Args:
        slope: a, at least 0.
        grace: b, versions.
    """

    slope: float = 10.0
    grace: int = 4

    def __call__(self, staleness: int) -> float:
        """1, or ``1 / (1 + a (s - b))`` beyond b."""
        return 1.0 / (1.0 + self.slope * max(staleness - self.grace, 0))
