"""The search for the instant at which silos wait least for one another: one sort and one running maximum."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ends: TypeAlias = NDArray[Any]
"""Checked step ends, shape [n silos, R steps], float64 or int64, ascending along R."""

Steps: TypeAlias = NDArray[np.int64]
"""One step a silo, shape [n], counted from 1."""


def sweep(ends: Ends) -> Steps:
    """Sort once, then one running maximum. Exact; O(R n log R n), all of it in NumPy.

    A window that starts at end ``a`` must reach, of every silo, the first end not before ``a``. Of those the latest is

        reach(a) = max(the silos' very first ends, the ends that follow some end b < a in b's silo),

    since an end that follows such a b is its silo's first end not before ``a``, or lies before ``a``. The window with
    the least ``reach(a) - a`` wins; reach never falls as ``a`` grows, so the first such window ends earliest.
    """
    flat = ends.ravel()
    order = flat.argsort()
    starts = flat[order]
    # No window starts after the earliest of the silos' last ends. Before it, no end is the last of its silo: the one
    # that follows is the next in flat. Of equal starts the first sees only b < a; the others see b = a, reach no less.
    before = int(starts.searchsorted(ends[:, -1].min()))
    reach = np.empty(before + 1, dtype=flat.dtype)
    reach[0] = ends[:, 0].max()
    reach[1:] = flat[order[:before] + 1]
    np.maximum.accumulate(reach, out=reach)
    return last_steps(ends, reach[(reach - starts[: before + 1]).argmin()])


def last_steps(ends: Ends, time: float) -> Steps:
    """Each silo's last step that ends not after ``time``: rule 3."""
    return np.asarray(np.count_nonzero(ends <= time, axis=1), dtype=np.int64)
