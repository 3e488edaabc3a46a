"""What balancers share: whether a total fits at all, and shares in whole numbers."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from fedsync.common.errors import ConfigError
from fedsync.core.protocols import Bounds


def check_total(total: int, bounds: Bounds) -> None:
    """Check that sizes within bounds can sum to ``total``.

    Raises:
        ConfigError: they cannot; says what they could sum to.
    """
    lowest, highest = int(bounds.floor.sum()), int(bounds.cap.sum())
    if not lowest <= total <= highest:
        raise ConfigError(
            "balancer",
            f"{len(bounds.cap)} silos can take {lowest} to {highest} samples a step together, not {total}",
            "Change local.batch_size, balancer.floor or balancer.cap",
        )


def round_shares(shares: NDArray[np.float64], total: int, cap: NDArray[np.int64]) -> NDArray[np.int64]:
    """Whole numbers by largest remainder, ties to the lowest index.

    Args:
        shares: float64 [n], each at most its cap, summing to ``total`` but for rounding.
        total: what the result sums to.
        cap: int64 [n], the most that each may be.
    """
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
    """The whole batch sizes whose slowest silo, at ``size / speed`` seconds, is as fast as it can be.

    Samples go one by one to the silo that ends first with one more, ties to the slower one, which has the larger
    remainder, then to the lowest index. Where shares are in proportion to speed, every
    sample that is kept by rounding down would have been given before any that is left, so only those are given out.

    Args:
        shares: as for `round_shares`, in proportion to speed between floors and caps.
        total: likewise.
        cap: likewise.
        speeds: float64 [n], samples per second.
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
    """A share like 39.999999999 is 40 that lost its last bits on the way."""
    return np.floor(shares + 1e-9).astype(np.int64)
