"""FSP's two ways to choose the interval between barriers, written from the paper.

Source: Wang et al., "FSP: Towards Flexible Synchronous Parallel Frameworks for Distributed Machine Learning",
section 3.3: binary search (FSPB), and the linear fit of one stage (FSPV, Equation 7).
"""

from __future__ import annotations

import math
from collections.abc import Callable


def binary_search(
    start_s: float, factor: int, objective_change: Callable[[float, int], float], most: int
) -> list[float]:
    """The interval [s] of each iteration of a search by FSPB, until it stops or ``most`` iterations went by.

    The change of the objective over one iteration of ``eta`` is compared with the change over the ``factor`` iterations
    of ``eta / factor`` that follow it. The smaller interval takes effect if its change is larger, and is then compared
    with the next smaller one. Otherwise the search ends with the larger interval.

    Args:
        objective_change: change of the objective in the iteration of this length [s] and number (from 0).
    """
    interval, intervals = start_s, [start_s]
    change = objective_change(interval, 0)
    while len(intervals) < most:
        smaller, smaller_change = interval / factor, 0.0
        for _ in range(factor):
            smaller_change += objective_change(smaller, len(intervals))
            intervals.append(smaller)
        if change >= smaller_change:
            intervals.append(interval)
            break
        interval = smaller
        change = objective_change(interval, len(intervals))
        intervals.append(interval)
    return intervals[:most]


def fitted_line(first: tuple[float, float], second: tuple[float, float]) -> tuple[float, float]:
    """Slope ``a`` and intercept ``b`` of ``g(eta) = a eta + b`` through two points (interval, progress per second)."""
    slope = (second[1] - first[1]) / (second[0] - first[0])
    return slope, first[1] - slope * first[0]


def gain(interval_s: float, barrier_s: float, slope: float, intercept: float) -> float:
    """Equation 7 with a stage of length T = 1: ``(T - phi T / (eta + phi)) g(eta)``."""
    return (1 - barrier_s / (interval_s + barrier_s)) * (slope * interval_s + intercept)


def best_interval(barrier_s: float, slope: float, intercept: float) -> float:
    """The interval with the greatest gain [s], by hand: the derivative of Equation 7 is zero.

    ``a eta^2 + 2 a phi eta + b phi = 0``, so ``eta = sqrt(phi^2 - b phi / a) - phi``. Infinite if the progress does not
    fall with the interval.
    """
    if slope >= 0:
        return math.inf
    return math.sqrt(barrier_s**2 - intercept * barrier_s / slope) - barrier_s
