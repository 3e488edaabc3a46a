"""Batch sizes in multiples, for tensor cores and for graphs compiled for a few sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedsync.core.protocols import Balancer, Bounds
from fedsync.core.speed.curve import Curve
from fedsync.policies.balance.whole import check_total

Share = Callable[[int, Bounds], NDArray[np.int64]]
"""Shares a number of multiples within bounds, which are counted in multiples too."""


def in_multiples(multiple: int, total: int, bounds: Bounds, share: Share) -> NDArray[np.int64]:
    """Sizes within bounds that sum to ``total``, multiples where bounds allow; int64 [n] in samples.

    A silo without a multiple between its bounds gets its upper bound. The remainder of the total goes to as few other
    silos as can take it, the first in order. ``share`` shares the multiples; ``multiple`` is at least 1.

    Raises:
        ConfigError: the bounds cannot hold ``total``.
    """
    check_total(total, bounds)
    if multiple == 1:
        return share(total, bounds)
    floor, cap = -(-bounds.floor // multiple), bounds.cap // multiple
    none = floor > cap
    floor, cap = np.where(none, 0, floor), np.where(none, 0, cap)
    fitting = (total - int(bounds.cap[none].sum())) // multiple
    count = int(np.clip(fitting, floor.sum(), cap.sum()))
    sizes = np.where(none, bounds.cap, share(count, Bounds(floor, cap)) * multiple)
    missing = total - int(sizes.sum())
    room = bounds.cap - sizes if missing > 0 else sizes - bounds.floor
    moved = np.clip(abs(missing) - (np.cumsum(room) - room), 0, room)
    settled: NDArray[np.int64] = sizes + np.sign(missing) * moved
    return settled


@dataclass(frozen=True, slots=True)
class InMultiples:
    """Sizes of another balancer, in multiples where bounds allow; see `in_multiples`."""

    inner: Balancer
    multiple: int

    def plan(self, curves: Sequence[Curve], total: int, bounds: Bounds) -> NDArray[np.int64]:
        scaled = [curve.of_multiples(self.multiple) for curve in curves]
        return in_multiples(self.multiple, total, bounds, lambda count, units: self.inner.plan(scaled, count, units))
