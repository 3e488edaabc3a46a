"""FSP's two ways to choose the interval between barriers, written from the paper.

Source: Wang et al., "FSP: Towards Flexible Synchronous Parallel Frameworks for Distributed Machine Learning",
section 3.3: binary search (FSPB), and the linear fit of one stage (FSPV, Equation 7).
"""

from __future__ import annotations

import math
from collections.abc import Callable


def binary_search(start_s: float, factor: int, change: Callable[[float], float]) -> float:
    """The interval [s] in which FSPB's search ends.

    The change over one iteration of ``eta`` is compared with the change over the ``factor`` iterations of ``eta /
    factor`` that follow it. The smaller interval takes effect as long as its change is larger.

    Args:
        change: change of the objective in an iteration of this length [s]; the search assumes that it is the same in
            the whole training.
    """
    interval = start_s
    while factor * change(interval / factor) > change(interval):
        interval /= factor
    return interval


def best_interval(first: tuple[float, float], second: tuple[float, float], barrier_s: float) -> float:
    """The interval with the greatest gain [s] in a stage of FSPV.

    The progress per second, ``g(eta) = a eta + b``, goes through two points (interval, progress per second). The gain,
    Equation 7, is ``(T - phi T / (eta + phi)) g(eta)``. Its derivative is zero where ``a eta^2 + 2 a phi eta + b phi =
    0``, so ``eta = sqrt(phi^2 - b phi / a) - phi``. Infinite if the progress does not fall with the interval.
    """
    slope = (second[1] - first[1]) / (second[0] - first[0])
    intercept = first[1] - slope * first[0]
    return math.inf if slope >= 0 else math.sqrt(barrier_s**2 - intercept * barrier_s / slope) - barrier_s
