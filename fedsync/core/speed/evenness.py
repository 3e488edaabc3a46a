"""Limits of batch sizes that make them more even than a balancer's where this shortens the time to a target.

The time to a target is the number of rounds times the duration of a round. The balancer's sizes have the shortest
rounds. But the variance of the mean gradient of n silos with equal weights is proportional to sum 1 / x_i, and with it
grows the number of rounds: with r, the variance divided by that of equal sizes, as ``1 + noise (r - 1)``. ``noise`` is
B_noise / (B + B_noise), where B is the batch of all silos together and B_noise the gradient noise scale.

If orders have neither overhead nor launch time, the balancer's sizes are the best for any noise: the duration of a
round is then proportional to the slow silos' sizes, and the number of rounds falls more slowly. The longer the
overhead, the more even are the best sizes.

Source: McCandlish et al., An Empirical Model of Large-Batch Training (arXiv 1812.06162), section 2.2, equation 2.7.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedsync.core.protocols import Bounds
from fedsync.core.speed.curve import Curve

_LEVELS = 17
"""Number of durations of a round that are tried."""

_LONGER = 0.08
"""Share by which a round may become longer; below the slack of the barrier ``on-time``, which would stop it."""

Reals = NDArray[np.float64]


def most_even(
    sizes: NDArray[np.int64],
    even: NDArray[np.int64],
    curves: Sequence[Curve],
    overhead_s: Reals,
    noise: float,
    bounds: Bounds,
) -> NDArray[np.int64]:
    """Return the largest size of each silo, int64 [n], of the best duration of a round; at least the balancer's sizes.

    Args:
        sizes, even: of the balancer, and without balance, int64 [n]; their sums are equal.
        curves: of whole orders: an order of size x takes ``step_s(x)``, overhead included.
        overhead_s: part of it that is not training, float64 [n].
        noise: from 0 to 1.
    """
    speed, launch_s, saturation = np.array([(each.speed, each.launch_s, each.saturation) for each in curves]).T

    def seconds(given: Reals | NDArray[np.int64]) -> Reals:
        return np.asarray(launch_s + np.maximum(given, saturation) / speed)

    balanced_s, even_s = seconds(sizes), seconds(even)
    # A balancer may consider training time only. So neither the round nor its training becomes longer than allowed.
    trained_s, whole_s = (balanced_s - overhead_s).max(), balanced_s.max()
    longer_s = max(even_s.max() - whole_s, (even_s - overhead_s).max() - trained_s, 0.0)
    levels_s = np.linspace(0.0, min(longer_s, _LONGER * whole_s), _LEVELS)[:, None]
    allowed_s = np.minimum(whole_s, trained_s + overhead_s) + levels_s
    limits = np.clip((allowed_s - launch_s) * speed, sizes, bounds.cap)
    given = _levelled(limits, float(sizes.sum()))
    rounds = 1 + noise * ((sizes.mean() / np.maximum(given, 1.0)).mean(axis=1) - 1)
    best = int((rounds * seconds(given).max(axis=1)).argmin())
    return sizes if best == 0 else np.floor(limits[best] + 1e-9).astype(np.int64)


def _levelled(limits: Reals, total: float) -> Reals:
    """Return the most even sizes within limits that sum to ``total``: in each row, the same, or the limit if lower."""
    rising = np.sort(limits, axis=1)
    left = np.arange(limits.shape[1], 0, -1)
    level = (total - (np.cumsum(rising, axis=1) - rising)) / left
    first = (level <= rising + 1e-9).argmax(axis=1)[:, None]
    return np.minimum(limits, np.take_along_axis(level, first, axis=1))
