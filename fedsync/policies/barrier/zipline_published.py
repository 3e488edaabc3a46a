"""ZipLine's searches as published, and those that the paper compares them with: slower than `sweep`, for comparison.

What they turn out to be (silos count from 0, steps from 1; the three rules are those of the module `zipline`):

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

The published costs leave out the sort, O(R n log R n), and `zipline_opt_bs` finds an end in O(log n) but still closes
the gap that it leaves in an array in O(n).

Source: Zhao et al., "ZipLine: an optimized algorithm for the elastic bulk synchronous parallel model", Machine
Learning, 2021, sections 4 and 5.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator

import numpy as np

from fedsync.policies.barrier.sweep import Ends, Steps, last_steps

NAIVE_LIMIT = 1_000_000
"""The most combinations, R^n, that `naive` tries: some seconds."""


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
    return last_steps(ends, best[1])


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
    return last_steps(ends, best[1])


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
    return last_steps(ends, best[1])


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


def _scan(ends: Ends) -> Iterator[tuple[float, int, int]]:
    """Yield (end, silo, step) in order of end, then of silo, then of step: the paper's Omega."""
    flat = ends.ravel()
    order = flat.argsort(kind="stable")
    silo, step = np.divmod(order, ends.shape[1])
    return zip(flat[order].tolist(), silo.tolist(), (step + 1).tolist(), strict=True)


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
