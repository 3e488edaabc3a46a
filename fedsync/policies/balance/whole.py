"""What balancers share: whether a total fits at all, and shares in whole numbers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedsync.core.errors import ConfigError
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
    # A share like 39.999999999 is 40 that lost its last bits on the way.
    sizes = np.floor(shares + 1e-9).astype(np.int64)
    remainders = shares - sizes
    left = total - int(sizes.sum())
    while left > 0:
        order = np.argsort(-remainders, kind="stable")
        chosen = order[sizes[order] < cap[order]][:left]
        sizes[chosen] += 1
        remainders[chosen] -= 1.0
        left -= len(chosen)
    return sizes
