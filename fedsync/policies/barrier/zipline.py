"""ElasticBSP's question: at which future instant do the silos wait least for one another?

Given the predicted step ends of every silo, choose one end a silo so that their spread, max - min, is least. The spread
is how long the first silo waits for the last; the max is the instant to synchronise (section 4.1, Problem 1).

**The answer is unique.** Every exact method returns the same point, ties included:

1. least waiting;
2. then the earliest time (section 4.2: the longer a superstep, the staler the work of the fast silos);
3. then the latest steps: each silo synchronises at its last step that ends not after ``time``.

Rule 3 is Algorithm 2's "for elements with the same p values, keep the latest". The steps thus follow from ``time``
alone: no later step fits, and an earlier one cannot lessen a spread that is already least.

**What the published algorithms turn out to be** (silos count from 0, steps from 1):

- `zipline`, `zipline_opt`, `zipline_opt_bs`: exact in time and waiting. As printed, Algorithm 2 takes from an empty
  set: once the ends run out, line 15 still asks for more. To stop there without a guard returns an incomplete set:
  ``[[1, 2], [3, 4]]`` leaves {4}, spread 0, where the least is 1. Here an incomplete set is no candidate. Section 5.2
  says that the order of equal ends "does not affect the final solution": true of time and waiting, not of the set. For
  ``[[5, 8], [7, 8], [7, 9]]`` silo 1 stops at 7 or at 8 as the order falls; rule 3 says 8.
- `full_grid_scan`: a heuristic, though the paper calls it exhaustive and credits it with 100 %. The end nearest to the
  designated one may lie on its wrong side: ``[[0, 0], [3, 3], [-2, 3], [0, 5]]`` has {0, 3, 3, 0}, spread 3, but every
  designated end leads to a spread of 5. Up to three silos it finds the least spread: designate the middle end of the
  best set. On tables as in section 6.1 it finds 9 of 10 at n = 100, R = 15 (``bench/papers/zipline.py``).
- `grid_scan`: a heuristic, as the paper says.
- `naive`: exact, for tests.
- `sweep`: not in the paper; exact; the default.

The published costs leave out the sort, O(R n log R n), and `zipline_opt_bs` finds an end in O(log n) but still closes
the gap that it leaves in an array in O(n).

Source: Zhao et al., "ZipLine: an optimized algorithm for the elastic bulk synchronous parallel model", Machine
Learning, 2021, sections 4 and 5.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ends: TypeAlias = NDArray[Any]
"""Checked step ends, shape [n silos, R steps], float64 or int64, ascending along R."""

Steps: TypeAlias = NDArray[np.int64]
"""One step a silo, shape [n], counted from 1."""

NAIVE_LIMIT = 1_000_000
"""The most combinations, R^n, that `naive` tries: some seconds."""

_INT64_MAX = int(np.iinfo(np.int64).max)


@dataclass(frozen=True, slots=True, eq=False)  # eq of arrays has no one truth value
class SyncPoint:
    """Where the silos synchronise.

    Args:
        time: the sync instant, the latest chosen end; unit of ``ends``, an int for ints.
        waiting: latest minus earliest chosen end, how long the first silo waits; unit of ``ends``.
        steps: the step, counted from 1, at which each silo synchronises; shape [n], int64.
    """

    time: float
    waiting: float
    steps: Steps


@dataclass(frozen=True, slots=True)
class Method:
    """A way to search.

    Args:
        search: checked ends -> steps.
        exact: whether it finds the unique point of the module's three rules on every input.
    """

    search: Callable[[Ends], Steps]
    exact: bool


def find_sync_point(ends: ArrayLike, method: str = "sweep") -> SyncPoint:
    """Choose one step end a silo with the least spread; ties by the module's three rules.

    Args:
        ends: predicted ends of the next R steps, shape [n, R], float or int, ascending along R; any unit of time.
        method: a key of `METHODS`. Heuristics return a valid point, not always the least waiting.

    Raises:
        ValueError: ``ends`` is not 2-D, empty, not float or int, not finite, not ascending or spans more than its type
            holds; ``method`` is unknown, or is ``naive`` and R^n exceeds `NAIVE_LIMIT`.
    """
    if method not in METHODS:
        near = get_close_matches(method, METHODS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"unknown method {method!r}{hint} Known: {', '.join(METHODS)}")
    table = _checked(ends)
    steps = METHODS[method].search(table)
    chosen = table[np.arange(len(table)), steps - 1]
    time = chosen.max()
    return SyncPoint(time.item(), (time - chosen.min()).item(), steps)


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
    return _last_steps(ends, reach[(reach - starts[: before + 1]).argmin()])


def zipline(ends: Ends) -> Steps:
    """Scan the ends in order, hold each silo's latest; a full set is a candidate. Exact; O(R n^2).

    Source: Algorithm 2.
    """
    best = (math.inf, math.inf)
    held: dict[int, float] = {}
    for time, silo, _ in _scan(ends):
        held[silo] = time
        if len(held) == len(ends):
            earliest = min(held, key=held.__getitem__)
            best = min(best, (time - held[earliest], time))
            del held[earliest]
    return _last_steps(ends, best[1])


def zipline_opt(ends: Ends) -> Steps:
    """ZipLine with the set in order of time: a candidate only when its earliest end goes. Exact; O(R n^2).

    Source: section 5.3.1 and Theorem 3.
    """
    best = (math.inf, math.inf)
    held: dict[int, float] = {}
    order: list[int] = []  # the silos of held, earliest end first
    for time, silo, _ in _scan(ends):
        improves = silo not in held or order[0] == silo
        if silo in held:
            order.remove(silo)
        order.append(silo)
        held[silo] = time
        if improves and len(order) == len(ends):
            best = min(best, (time - held[order[0]], time))
    return _last_steps(ends, best[1])


def zipline_opt_bs(ends: Ends) -> Steps:
    """ZipLineOpt that finds the end to replace by bisection. Exact; O(R n log n) comparisons.

    Bisection needs equal ends in order of silo, in the set as in the scan.

    Source: section 5.3.2.
    """
    best = (math.inf, math.inf)
    rows = ends.tolist()
    held: list[tuple[float, int]] = []  # (end, silo), ascending
    for time, silo, step in _scan(ends):
        at = 0
        if step > 1:
            at = bisect_left(held, (rows[silo][step - 2], silo))
            del held[at]
        held.append((time, silo))
        if at == 0 and len(held) == len(ends):
            best = min(best, (time - held[0][0], time))
    return _last_steps(ends, best[1])


def grid_scan(ends: Ends) -> Steps:
    """Around each end of the silo that ends a step first, take every other silo's nearest end. Heuristic; O(R^2 n).

    Of equal spreads the earliest time; of two ends equally near the earlier. The paper leaves both open.

    Source: Algorithm 1.
    """
    return _nearest(ends, [int(ends[:, 0].argmin())])


def full_grid_scan(ends: Ends) -> Steps:
    """`grid_scan` around each end of every silo. Heuristic from four silos on; O(R^2 n^2).

    Source: section 5.1.
    """
    return _nearest(ends, range(len(ends)))


def naive(ends: Ends) -> Steps:
    """Try every combination. Exact; O(n R^n), at most `NAIVE_LIMIT` combinations.

    Source: section 5.1.

    Raises:
        ValueError: R^n exceeds `NAIVE_LIMIT`.
    """
    n, r = ends.shape
    if r**n > NAIVE_LIMIT:
        raise ValueError(f"naive would try {r}^{n} combinations, more than {NAIVE_LIMIT}; use method 'sweep'")
    rows = ends.tolist()

    def rank(steps: tuple[int, ...]) -> tuple[float, float, list[int]]:
        chosen = [row[step - 1] for row, step in zip(rows, steps, strict=True)]
        return max(chosen) - min(chosen), max(chosen), [-step for step in steps]

    return np.array(min(itertools.product(range(1, r + 1), repeat=n), key=rank), dtype=np.int64)


METHODS: dict[str, Method] = {
    "sweep": Method(sweep, exact=True),
    "zipline": Method(zipline, exact=True),
    "zipline_opt": Method(zipline_opt, exact=True),
    "zipline_opt_bs": Method(zipline_opt_bs, exact=True),
    "full_grid_scan": Method(full_grid_scan, exact=False),
    "grid_scan": Method(grid_scan, exact=False),
    "naive": Method(naive, exact=True),
}
"""Name -> method."""


def _scan(ends: Ends) -> Iterator[tuple[float, int, int]]:
    """Yield (end, silo, step) in order of end, then of silo, then of step: the paper's Omega."""
    flat = ends.ravel()
    order = flat.argsort(kind="stable")
    silo, step = np.divmod(order, ends.shape[1])
    return zip(flat[order].tolist(), silo.tolist(), (step + 1).tolist(), strict=True)


def _last_steps(ends: Ends, time: float) -> Steps:
    """Each silo's last step that ends not after ``time``: rule 3."""
    return np.asarray(np.count_nonzero(ends <= time, axis=1), dtype=np.int64)


def _nearest(ends: Ends, designated: Iterable[int]) -> Steps:
    """The least spread, then the earliest, of the sets nearest to each end of the designated silos."""
    silos = np.arange(len(ends))
    best = (math.inf, math.inf)
    steps = np.empty(len(ends), dtype=np.int64)
    for silo in designated:
        for end in ends[silo]:
            picks = np.abs(ends - end).argmin(axis=1)
            chosen = ends[silos, picks]
            time = chosen.max().item()
            rank = (time - chosen.min().item(), time)
            if rank < best:
                best = rank
                steps = picks + 1
    return steps


def _checked(ends: ArrayLike) -> Ends:
    """``ends`` as float64 or int64, or a ValueError that says what is wrong and where."""
    try:
        table = np.asarray(ends)
    except ValueError as error:
        raise ValueError("ends must be a table: every silo needs a row of equally many steps") from error
    if table.ndim != 2:
        raise ValueError(f"ends must be a table [silos, steps], found shape {table.shape}; give one row a silo")
    if table.size == 0:
        raise ValueError(f"ends must hold a silo and a step, found shape {table.shape}; wait for a first forecast")
    if table.dtype.kind not in "fiu":
        raise ValueError(f"ends must be float or int, found dtype {table.dtype}; give times, one unit for all silos")
    if table.dtype.kind == "f":
        table = table.astype(np.float64, copy=False)
        if not np.isfinite(table).all():
            silo, step = np.argwhere(~np.isfinite(table))[0]
            found = table[silo, step]
            raise ValueError(f"ends must be finite, found {found} at silo {silo}, step {step + 1}; leave that silo out")
    falls = table[:, 1:] < table[:, :-1]
    if falls.any():
        silo, step = np.argwhere(falls)[0]
        first, second = table[silo, step : step + 2]
        raise ValueError(
            f"ends must ascend along each row, found {second} after {first} at silo {silo}, step {step + 2}; "
            "give ends, not durations (np.cumsum turns one into the other)"
        )
    low, high = table[:, 0].min().item(), table[:, -1].max().item()
    if isinstance(high, int):
        if max(high, high - low) > _INT64_MAX:
            raise ValueError(f"ends must span less than 2^63, found {low} to {high}; count from the present")
        return table.astype(np.int64, copy=False)
    if math.isinf(high - low):
        raise ValueError(f"ends must have a finite span, found {low} to {high}; use a larger unit of time")
    return table
