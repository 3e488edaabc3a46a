"""Confidence intervals from sums alone, without the samples."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsync.evaluation.metrics.metric_types import FEWEST, LEVEL, Interval, Sums, Values

DRAWS = 1000
"""Number of bootstrap draws."""

_T = (
    *(12.706204736, 4.302652730, 3.182446305, 2.776445105, 2.570581836, 2.446911851, 2.364624252, 2.306004135),
    *(2.262157163, 2.228138852, 2.200985160, 2.178812830, 2.160368656, 2.144786688, 2.131449546),
)
"""Student's t for a level of 95 %, by degrees of freedom from 1 on."""


def bootstrap(
    strata: Sums, rebuilt: Callable[[NDArray[np.int64]], NDArray[Any]], values: Values, seed: int
) -> Interval | None:
    """Return percentiles of a metric over samples drawn with replacement, stratum by stratum.

    ``strata`` counts a class's samples in each cell, [n, cells], and ``rebuilt`` maps drawn counts [draws, n, cells] to
    sums [draws, size]. None if a stratum has fewer than `FEWEST` samples, but not none, or a draw has no value.
    """
    totals = strata.sum(axis=1)
    there = totals > 0
    if not there.any() or totals[there].min() < FEWEST:
        return None
    drawn = _drawn(strata.tobytes(), strata.shape, seed)
    return middle_of(values(rebuilt(drawn).astype(np.float64)))


def middle_of(drawn: Sums) -> Interval | None:
    """Return the central interval at `LEVEL` of numbers [draws]; None if one is not finite."""
    if not np.isfinite(drawn).all():
        return None
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


@lru_cache(maxsize=1)
def _drawn(strata: bytes, shape: tuple[int, ...], seed: int) -> NDArray[np.int64]:
    """Return counts [draws, n, cells]. By the cache, all metrics of one statistic see the same draws."""
    counts = np.frombuffer(strata).reshape(shape)
    totals = counts.sum(axis=1)
    there, drawn = totals > 0, np.zeros((DRAWS, *shape), np.int64)
    sizes, shares = totals[there].astype(np.int64), counts[there] / totals[there, None]
    drawn[:, there] = np.random.default_rng(seed).multinomial(sizes, shares, (DRAWS, len(sizes)))
    return drawn


def flat(drawn: NDArray[np.int64]) -> NDArray[Any]:
    return drawn.reshape(len(drawn), -1)


def jackknife(whole: Sums, without: Sums, values: Values) -> Interval | None:
    """Return a metric plus and minus Student's t times its standard error, leaving out one group at a time.

    ``whole`` are the sums of all samples, [size]; ``without`` those without each non-empty group, [groups, size].

    Source: Efron, Tibshirani: An Introduction to the Bootstrap (1993), section 11.5, the jackknife, of groups.
    """
    groups = len(without)
    if groups < FEWEST:
        return None
    found = values(np.concatenate([whole[None], without]))
    if not np.isfinite(found).all():
        return None
    value, each = float(found[0]), found[1:]
    apart = each - np.cumsum(each)[-1] / groups
    error = float(np.sqrt((groups - 1) / groups * np.cumsum(apart * apart)[-1]))
    half = _T[groups - 2] * error
    return value - half, value + half
