"""Helpers of balancers: the check of a total, and rounding of shares to whole numbers."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from fedsync.common.errors import ConfigError
from fedsync.core.protocols import Bounds


def check_total(total: int, bounds: Bounds) -> None:
    """Check that sizes within bounds can sum to ``total``.

    Raises:
        ConfigError: they cannot; the error names the possible totals.
    """
    lowest, highest = int(bounds.floor.sum()), int(bounds.cap.sum())
    if not lowest <= total <= highest:
        raise ConfigError(
            "balancer",
            f"{len(bounds.cap)} silos can take {lowest} to {highest} samples a step together, not {total}",
            "Change local.batch_size, balancer.floor or balancer.cap",
        )


def round_shares(shares: NDArray[np.float64], total: int, cap: NDArray[np.int64]) -> NDArray[np.int64]:
    """Round shares to whole numbers by largest remainder, ties to the lowest index.

    Args:
        shares: float64 [n], each at most its cap, summing to ``total`` up to rounding errors.
        total: sum of the result.
        cap: int64 [n], largest value of each.
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
    """Round shares so that the slowest silo, at ``size / speed`` seconds, is as fast as possible.

    Each sample goes to the silo that would end first with one more. Ties go to the slower silo, which has the larger
    remainder, then to the lowest index. If shares are in proportion to speed, rounding down keeps only samples that
    would be given before the remaining ones, so only the remaining ones are distributed.

    Args:
        shares: as for `round_shares`, in proportion to speed between floors and caps.
        total: sum of the result.
        cap: int64 [n], largest value of each.
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
    """Round down, but count a share like 39.999999999 as 40 with rounding errors."""
    return np.floor(shares + 1e-9).astype(np.int64)
