"""Rounding of batch sizes to whole numbers or multiples, within bounds and with a given total."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedsync.common.errors import ConfigError
from fedsync.core.protocols import Balancer, Bounds
from fedsync.core.speed.curve import Curve


def check_total(total: int, bounds: Bounds) -> None:
    """Raise `ConfigError`, with the possible totals, if sizes within bounds cannot sum to ``total``."""
    lowest, highest = int(bounds.floor.sum()), int(bounds.cap.sum())
    if not lowest <= total <= highest:
        problem = f"{len(bounds.cap)} silos can take {lowest} to {highest} samples a step together, not {total}"
        raise ConfigError("balancer", problem, "Change local.batch_size, balancer.floor or balancer.cap")


def round_shares(shares: NDArray[np.float64], total: int, cap: NDArray[np.int64]) -> NDArray[np.int64]:
    """Round shares, each at most its cap and summing to ``total``, by largest remainder, ties to the lowest index."""
    sizes = _rounded_down(shares)
    remainders = shares - sizes
    left = total - int(sizes.sum())
    while left > 0:
        order = np.argsort(-remainders, kind="stable")
        chosen = order[sizes[order] < cap[order]][:left]
        sizes[chosen] += 1
        remainders[chosen] -= 1.0
        left -= len(chosen)
    return sizes


def round_soonest(
    shares: NDArray[np.float64], total: int, cap: NDArray[np.int64], speeds: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Round shares in proportion to speed [samples/s] so that the slowest silo takes the least ``size / speed``. Of
    equally late silos the slower, then the lowest index, gets a remaining sample.
    """
    sizes = _rounded_down(shares)
    left = total - int(sizes.sum())
    if left == 0:
        return sizes
    free = np.flatnonzero(sizes < cap)
    ends_s = (sizes[free] + 1) / speeds[free]
    ends = list(zip(ends_s.tolist(), speeds[free].tolist(), free.tolist(), strict=True))
    heapq.heapify(ends)
    for _ in range(left):
        _, speed, silo = ends[0]
        sizes[silo] += 1
        if sizes[silo] < cap[silo]:
            heapq.heapreplace(ends, ((int(sizes[silo]) + 1) / speed, speed, silo))
        else:
            heapq.heappop(ends)
    return sizes


def _rounded_down(shares: NDArray[np.float64]) -> NDArray[np.int64]:
    """Round down, but count a share like 39.999999999 as 40 with a rounding error."""
    return np.floor(shares + 1e-9).astype(np.int64)


Share = Callable[[int, Bounds], NDArray[np.int64]]
"""Shares a number of multiples within bounds, which are counted in multiples too."""


def in_multiples(multiple: int, total: int, bounds: Bounds, share: Share) -> NDArray[np.int64]:
    """Sizes within bounds that sum to ``total``, multiples where bounds allow; int64 [n] in samples.

    A silo without a multiple between its bounds gets its upper bound. The remainder of the total goes to as few other
    silos as can take it, the first in order. Raises `ConfigError` if the bounds cannot hold ``total``.
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
