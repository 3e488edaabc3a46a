"""When a worker may continue and when a round ends, written from the papers: SSP, PSP and A-BSP.

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


def round_end_s(speeds: Sequence[float], points: Sequence[int], ratio: float) -> float:
    """A-BSP's Algorithm 1: seconds from the start of an iteration to the synchronization signal.

    The fastest task requests synchronization when all its points are processed. The signal follows when the share of
    the cluster's points that are processed is at least ``ratio``.

    Args:
        speeds: of the tasks [points/s], constant.
        points: input of each task.
    """
    ends = [n / v for n, v in zip(points, speeds, strict=True)]
    now, needed = min(ends), ratio * sum(points)
    while sum(min(n, v * now) for n, v in zip(points, speeds, strict=True)) < needed * (1 - 1e-12):
        running = [(v, end) for v, end in zip(speeds, ends, strict=True) if end > now]
        processed = sum(min(n, v * now) for n, v in zip(points, speeds, strict=True))
        now = min(now + (needed - processed) / sum(v for v, _ in running), min(end for _, end in running))
    return now


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
