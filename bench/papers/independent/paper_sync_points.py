"""ElasticBSP's searches for the next synchronization, written from the paper.

Source: Zhao et al., "ZipLine: an optimized algorithm for the elastic bulk synchronous parallel model", Problem 1,
section 4.2 (ties), naive search, and Algorithms 1 (GridScan, FullGridScan) and 2 (ZipLine).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

Times = Sequence[Sequence[float]]  # the predicted ends of each worker's next iterations, ascending [s]


def _spread(chosen: Sequence[float]) -> float:
    return max(chosen) - min(chosen)


def naive(times: Times) -> tuple[float, float]:
    """Least waiting and the earliest barrier that has it [s], over all choices of one end a worker (section 4.2)."""
    return min((_spread(chosen), max(chosen)) for chosen in product(*times))


def zipline(times: Times) -> tuple[float, float]:
    """Algorithm 2: least waiting and its barrier [s]."""
    omega = sorted((end, worker) for worker, row in enumerate(times) for end in row)
    chosen: dict[int, float] = {}
    best = (float("inf"), float("inf"))
    for end, worker in omega:
        chosen[worker] = end
        if len(chosen) == len(times) and _spread(list(chosen.values())) < best[0]:
            best = (_spread(list(chosen.values())), max(chosen.values()))
    return best


def grid_scan(times: Times, designated: int | None = None) -> float:
    """Algorithm 1: least waiting [s] of the choices nearest to the ends of one worker, by default the first to end."""
    if designated is None:
        designated = min(range(len(times)), key=lambda worker: times[worker][0])
    return min(
        _spread([end, *(min(row, key=lambda other: abs(other - end)) for row in times)]) for end in times[designated]
    )


def full_grid_scan(times: Times) -> float:
    """Algorithm 1 for each designated worker: least waiting [s]."""
    return min(grid_scan(times, worker) for worker in range(len(times)))
