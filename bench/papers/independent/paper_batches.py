"""LB-BSP's two algorithms for batch sizes, written from the paper.

Source: Chen et al., "Accelerating Distributed Learning in Non-Dedicated Environments" (LB-BSP), Algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

StepTime: TypeAlias = Callable[[int], float]
"""Seconds of a worker's step for its batch size."""


def moving_average(speeds: Sequence[float], alpha: float) -> float:
    """Exponential moving average of speeds [samples/s], oldest first (sections 3.2.2 and 3.5)."""
    average = speeds[0]
    for speed in speeds[1:]:
        average = alpha * speed + (1 - alpha) * average
    return average


def shares(speeds: Sequence[float], total: int) -> list[float]:
    """Batch sizes before rounding [samples] (Algorithm 1, line 5): ``x_i = v_i / sum(v) * X``."""
    return [speed / sum(speeds) * total for speed in speeds]


def rounded(exact: Sequence[float], total: int) -> list[int]:
    """Line 6: whole numbers that sum to ``total``. The paper names no rule; here by largest remainder."""
    sizes = [int(share) for share in exact]
    largest = sorted(range(len(exact)), key=lambda i: sizes[i] - exact[i])
    for i in largest[: total - sum(sizes)]:
        sizes[i] += 1
    return sizes


def slowest_s(step_s: Sequence[StepTime], total: int) -> float:
    """Problem 3 (section 3.1), by trying all whole sizes of at least 1: the least time of the slowest worker [s]."""
    return min(
        max(time(size) for time, size in zip(step_s, sizes, strict=True)) for sizes in _compositions(total, len(step_s))
    )


def _compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        for rest in _compositions(total - first, parts - 1):
            yield (first, *rest)


class GpuBatchSizes:
    """Algorithm 2: the batch sizes of GPU workers, one call an iteration.

    Args:
        step: the step size Delta of the fast-approach phase [samples]; 5 in the paper.
        window: the observation window D of that phase [iterations]; 5 in the paper.
        fine_step: Delta of the fine-tune phase; 1 in the paper.
        fine_window: D of the fine-tune phase; 20 in the paper.
    """

    def __init__(self, step: int = 5, window: int = 5, fine_step: int = 1, fine_window: int = 20) -> None:
        self.step, self.window = step, window
        self.fine = (fine_step, fine_window)
        self.times: list[list[float]] = []

    def update(self, sizes: Sequence[int], times: Sequence[float], memory: Sequence[float]) -> list[int]:
        """Sizes of iteration k, from the sizes and times [s] of iteration k - 1 and the used share of memory.

        A window that the history does not fill yet moves nothing.
        """
        self.times.append(list(times))
        workers = range(len(sizes))
        leader = min((i for i in workers if memory[i] <= 0.95), key=lambda i: times[i])  # line 2
        straggler = max(workers, key=lambda i: times[i])  # line 3
        new = list(sizes)  # line 4
        if sizes[straggler] <= self.step:  # line 5
            return new
        recent = self.times[-self.window :]
        if len(recent) == self.window and all(row[leader] < row[straggler] for row in recent):  # line 7
            new[leader] += self.step  # line 8
            new[straggler] -= self.step
        elif any(row[leader] > row[straggler] for row in self.times):  # line 9
            self.step, self.window = self.fine  # line 10
        return new
