"""LB-BSP's two algorithms for batch sizes, written from the paper.

Source: Chen et al., "Accelerating Distributed Learning in Non-Dedicated Environments" (LB-BSP), Algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Sequence


def moving_average(speeds: Sequence[float], alpha: float) -> float:
    """Exponential moving average of speeds [samples/s], oldest first (sections 3.2.2 and 3.5)."""
    average = speeds[0]
    for speed in speeds[1:]:
        average = alpha * speed + (1 - alpha) * average
    return average


def cpu_batch_sizes(speeds: Sequence[float], total: int) -> list[int]:
    """Algorithm 1, lines 5 and 6: ``x_i = v_i / sum(v) * X``, rounded so that the sum is X.

    The paper names no rule of rounding. Here the largest remainders are rounded up.
    """
    exact = [speed / sum(speeds) * total for speed in speeds]
    sizes = [int(share) for share in exact]
    largest = sorted(range(len(exact)), key=lambda i: sizes[i] - exact[i])
    for i in largest[: total - sum(sizes)]:
        sizes[i] += 1
    return sizes


class GpuBatchSizes:
    """Algorithm 2: the batch sizes of GPU workers, one call an iteration.

    ``step`` (Delta, samples) and ``window`` (D, iterations) are those of the fast-approach phase, and change with the
    fine-tune phase.
    """

    def __init__(self) -> None:
        self.step, self.window = 5, 5
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
            self.step, self.window = 1, 20  # line 10
        return new
