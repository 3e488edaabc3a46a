"""Barriers, written from the papers: when a worker may continue (SSP, PSP), and when a round ends (A-BSP).

Sources: "Probabilistic Synchronous Parallel" (PSP), sections 10.3 to 10.5 (also for SSP's bound); Wang et al.,
"Aggressive Synchronization with Partial Processing for Iterative ML Jobs on Clusters" (A-BSP), Algorithm 1 and
section 3.3.1.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import comb


def may_continue(clocks: Sequence[int], worker: int, staleness: int, sample: Collection[int]) -> bool:
    """Whether no worker of the sample lags more than ``staleness`` updates behind ``worker`` (10.4.1).

    SSP and BSP have all workers in the sample; BSP has a staleness of 0.
    """
    return all(clocks[worker] - clocks[other] <= staleness for other in sample)


def chance_to_continue(others: int, lagging: int, sample_size: int) -> float:
    """Probability that ``sample_size`` of ``others`` workers without replacement contain none that lags too far."""
    drawn = min(sample_size, others)
    return comb(others - lagging, drawn) / comb(others, drawn)


def signal_s(speeds: Sequence[float], points: Sequence[int], ratio: float) -> float:
    """A-BSP's Algorithm 1 with reports at every instant: seconds from the start of an iteration to the signal.

    Args:
        speeds: of the tasks [points/s], constant.
        points: input of each task.
    """

    def processed(now_s: float) -> float:
        return sum(min(count, speed * now_s) for count, speed in zip(points, speeds, strict=True))

    ends = [count / speed for count, speed in zip(points, speeds, strict=True)]
    early, late = min(ends), max(ends)
    if processed(early) >= ratio * sum(points):
        return early
    for _ in range(100):  # bisection: what is processed never falls
        middle = (early + late) / 2
        early, late = (early, middle) if processed(middle) >= ratio * sum(points) else (middle, late)
    return late


def processing_order(points: int, done: Sequence[int]) -> list[list[int]]:
    """Points that each iteration processes, in order: what was left out goes first (3.3.1).

    Args:
        done: points that each iteration processes before its signal, at most ``points``.
    """
    sequence, iterations = list(range(points)), []
    for count in done:
        iterations.append(sequence[:count])
        sequence = sequence[count:] + sequence[:count]
    return iterations
