"""Numbers of local steps, written from the papers: ElasticBSP's next synchronization, and FedCompass.

Sources: Zhao et al., "ZipLine: an optimized algorithm for the elastic bulk synchronous parallel model", Problem 1 and
section 4.2; Li et al., "FedCompass: Efficient Cross-Silo Federated Learning on Heterogeneous Client Devices using a
Computing Power-Aware Scheduler" (arXiv 2309.14675), procedures JOINGROUP and CREATEGROUP. FedCompass is written from
memory: the text of the paper was not at hand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product


def sync_point(times: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Least waiting and the earliest barrier that has it, over all choices of one end a worker (section 4.2).

    Args:
        times: predicted ends of each worker's next iterations, in any unit.
    """
    return min((max(chosen) - min(chosen), max(chosen)) for chosen in product(*times))


@dataclass(frozen=True, slots=True)
class PaperGroup:
    """An arrival group.

    Args:
        expected_s: when its clients are expected (T_a).
        latest_s: when it is aggregated without those that are still missing (T_max).
        seconds_per_step: of its clients, those that arrived included.
    """

    expected_s: float
    latest_s: float
    seconds_per_step: tuple[float, ...]


def assign(
    groups: Sequence[PaperGroup], now_s: float, seconds_per_step: float, least: int, most: int
) -> tuple[int | None, int]:
    """Group to join (None: a new one) and local steps of a client that begins now.

    Args:
        seconds_per_step: of the client (S_i).
        least: bound of the local steps (Q_min).
        most: bound of the local steps (Q_max).
    """
    joined, steps = None, -1
    for index, group in enumerate(groups):  # JOINGROUP: the most steps within the bounds
        possible = math.floor((group.expected_s - now_s) / seconds_per_step)
        if least <= possible <= most and possible > steps:
            joined, steps = index, possible
    if joined is not None:
        return joined, steps
    for group in groups:  # CREATEGROUP: together with the next arrival of a group's fastest client
        if now_s < group.latest_s:
            together_s = group.latest_s + most * min(group.seconds_per_step)
            possible = math.floor((together_s - now_s) / seconds_per_step)
            if possible <= most:
                steps = max(steps, possible)
    return None, most if steps < 0 else max(steps, least)
