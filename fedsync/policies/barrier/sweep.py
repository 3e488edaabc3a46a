"""Fast search for the synchronisation time with the least waiting: one sort and one running maximum."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ends: TypeAlias = NDArray[Any]
"""Checked step ends, shape [n silos, R steps], float64 or int64, ascending along R."""

Steps: TypeAlias = NDArray[np.int64]
"""One step a silo, shape [n], counted from 1."""


def sweep(ends: Ends) -> Steps:
    """Find the sync point with one sort and one running maximum. Exact; O(R n log R n), all of it in NumPy.

    A window that starts at end ``a`` must reach, for every silo, the first end not before ``a``. The latest of these is

        reach(a) = max(the silos' very first ends, the ends that follow some end b < a in b's silo),

    since an end that follows such a b either is its silo's first end not before ``a``, or lies before ``a``. The window
    with the least ``reach(a) - a`` wins. Reach never falls as ``a`` grows, so the first such window ends earliest.
    """
    flat = ends.ravel()
    order = flat.argsort()
    starts = flat[order]
    # No window starts after the earliest of the silos' last ends. Every earlier end has a successor in its silo, which
    # is next in flat. Among equal starts, the first sees only b < a; the others see b = a, which gives no less reach.
    before = int(starts.searchsorted(ends[:, -1].min()))
    reach = np.empty(before + 1, dtype=flat.dtype)
    reach[0] = ends[:, 0].max()
    reach[1:] = flat[order[:before] + 1]
    np.maximum.accumulate(reach, out=reach)
    return last_steps(ends, reach[(reach - starts[: before + 1]).argmin()])


def last_steps(ends: Ends, time: float) -> Steps:
    """Each silo's last step that ends not after ``time``: rule 3 of `fedsync.policies.barrier.zipline`."""
    return np.asarray(np.count_nonzero(ends <= time, axis=1), dtype=np.int64)
