"""Published ZipLine searches for the end of a superstep, and the paper's baselines; all are slower than `sweep`.

Observed behaviour (silos count from 0, steps from 1; `fedsync.policies.barrier.kinds.elastic` lists the three rules):

- `zipline`, `zipline_opt`, `zipline_opt_bs`: exact in time and waiting. As printed, Algorithm 2 takes from an empty
  set: once the ends run out, line 15 still asks for more. Stopping there without a guard returns an incomplete set:
  ``[[1, 2], [3, 4]]`` leaves {4} with spread 0, but the least spread is 1. Here an incomplete set is no candidate.
  Section 5.2 says that the order of equal ends "does not affect the final solution". This holds for time and waiting,
  not for the set: in ``[[5, 8], [7, 8], [7, 9]]``, silo 1 stops at 7 or 8 depending on the order; rule 3 says 8.
- `full_grid_scan`: a heuristic, although the paper calls it exhaustive and credits it with 100 %. The end nearest to
  the designated end may lie on the wrong side: ``[[0, 0], [3, 3], [-2, 3], [0, 5]]`` has {0, 3, 3, 0}, spread 3, but
  every designated end leads to a spread of 5. For up to three silos it finds the least spread: designate the middle
  end of the best set. On tables as in section 6.1 it finds 9 of 10 at n = 100, R = 15 (``bench/papers/zipline.py``).
- `grid_scan`: a heuristic, as the paper says.
- `naive`: exact, for tests.

The published costs omit the sort, O(R n log R n). `zipline_opt_bs` finds an end in O(log n), but closing the gap in the
array still takes O(n).

Source: Zhao et al., "ZipLine: an optimized algorithm for the elastic bulk synchronous parallel model", Machine
Learning, 2021, sections 4 and 5.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator

import numpy as np

from fedsync.policies.barrier.kinds.elastic import Ends, Steps, last_steps

NAIVE_LIMIT = 1_000_000
"""Most combinations, R^n, that `naive` tries; they take some seconds."""


def zipline(ends: Ends) -> Steps:
    """Scan the ends in order and hold each silo's latest; a full set is a candidate. Exact; O(R n^2). Algorithm 2."""
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
    """ZipLine with the set in time order: a candidate only when its earliest end is replaced. Exact; O(R n^2).

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
    """ZipLineOpt that finds the end to replace by bisection. Exact; O(R n log n) comparisons. Section 5.3.2.

    Bisection needs equal ends in order of silo, in the set as in the scan.
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
    """Take every other silo's end nearest to each end of the fastest silo. Heuristic; O(R^2 n). Algorithm 1.

    The fastest silo is the first to end a step. Ties, which the paper leaves open: of equal spreads the earliest time,
    of two equally near ends the earlier.
    """
    return _nearest(ends, [int(ends[:, 0].argmin())])


def full_grid_scan(ends: Ends) -> Steps:
    """Apply `grid_scan` to the ends of every silo. Heuristic for four or more silos; O(R^2 n^2). Section 5.1."""
    return _nearest(ends, range(len(ends)))


def naive(ends: Ends) -> Steps:
    """Try every combination. Exact; O(n R^n). Section 5.1. Raises `ValueError` if R^n exceeds `NAIVE_LIMIT`."""
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
    """Return the set with the least spread, then the earliest, among the sets nearest to each designated end."""
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
