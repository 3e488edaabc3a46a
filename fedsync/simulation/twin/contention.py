"""Detection of load by other processes in a series of step times: none, two lasting states, or a general trace.

Pure jitter has no correlation between neighbours; load has, because it lasts. So a series with similar neighbours is
loaded. If two levels explain nearly all of the load, it is a two-state Markov chain, else a trace.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedsync.simulation.load import Piece
from fedsync.simulation.twin.records import Stretch

Floats = NDArray[np.float64]

FEWEST = 12
"""Smallest number of points for any load."""

LEAST = 0.1
"""Smallest log ratio of slow to fast for two states."""

TWO_STATES = 0.15
"""Largest share of squares within two states; an even spread that is cut in two has 0.25."""


@dataclass(frozen=True, slots=True)
class TwoStates:
    """Load with an on state, which multiplies the speed by ``factor``, and an off state.

    ``on_s`` and ``off_s`` are mean durations [s]; ``on`` and ``off`` count the observed ends of each state.
    """

    factor: float
    on_s: float
    off_s: float
    on: int
    off: int


@dataclass(frozen=True, slots=True)
class LoadFound:
    """Load found in a series.

    Args:
        slowness: divisor of each point's time that removes the load, float64 [points].
        clean: points with a reliably known load, bool [points].
        pieces: trace of the speed, if the load is not two states.
    """

    slowness: Floats
    clean: NDArray[np.bool_]
    states: TwoStates | None = None
    pieces: tuple[Piece, ...] = ()


def find_load(stretches: Sequence[Stretch], ratios: Floats) -> LoadFound:
    """Detect the load in points of ascending time; ``ratios`` are their times over the idle machine's, float64."""
    count, logs = len(ratios), np.log(ratios)
    idle = LoadFound(np.ones(count), np.ones(count, dtype=np.bool_))
    centred = logs - logs.mean()
    squares = float(centred @ centred)
    if count < FEWEST or squares < count * 1e-6 or float(centred[1:] @ centred[:-1]) / squares < 2 / count**0.5:
        return idle
    slow = logs > _cut(np.sort(logs))
    # A point next to a change contains both states.
    changes = slow[1:] != slow[:-1]
    clean = ~(np.append(changes, False) | np.insert(changes, 0, False))
    if not ((clean & slow).any() and (clean & ~slow).any()):
        clean = idle.clean
    levels = np.where(slow, np.median(logs[clean & slow]), np.median(logs[clean & ~slow]))
    known = logs[clean]
    within = float(np.sum((known - levels[clean]) ** 2))
    if within < TWO_STATES * float(np.sum((known - known.mean()) ** 2)) and np.ptp(levels) > LEAST:
        return _two_states(stretches, slow, clean, float(np.ptp(levels)))
    return _trace(stretches, ratios)


def _cut(ordered: Floats) -> float:
    """Return the cut between two groups with the least squares within the groups."""
    count = np.arange(1, len(ordered))
    left, right = np.cumsum(ordered)[:-1], np.cumsum(ordered[::-1])[:-1][::-1]
    between = left**2 / count + right**2 / (len(ordered) - count)
    at = int(np.argmax(between))
    return float(ordered[at] + ordered[at + 1]) / 2


def _two_states(
    stretches: Sequence[Stretch], slow: NDArray[np.bool_], clean: NDArray[np.bool_], gap: float
) -> LoadFound:
    ends = [each.at_s + each.steps * each.step_s for each in stretches]
    begins = [each.at_s for each in stretches]
    edges = np.array([begins[0], *((e + b) / 2 for e, b in zip(ends[:-1], begins[1:], strict=True)), ends[-1]])
    seconds = np.diff(edges)
    on = int(np.sum(slow[:-1] & ~slow[1:]))
    off = int(np.sum(~slow[:-1] & slow[1:]))
    on_s, off_s = float(seconds[slow].sum()) / max(on, 1), float(seconds[~slow].sum()) / max(off, 1)
    slowness = np.where(slow, math.exp(gap), 1.0)
    return LoadFound(slowness, clean, TwoStates(math.exp(-gap), max(on_s, 1e-3), max(off_s, 1e-3), on, off))


def _trace(stretches: Sequence[Stretch], ratios: Floats) -> LoadFound:
    """Return one factor an order: variation within an order is jitter."""
    orders = np.array([each.order for each in stretches])
    weights = np.array([each.steps for each in stretches])
    slowness, pieces = np.ones(len(ratios)), list[Piece]()
    for number in np.unique(orders):
        these = orders == number
        slowness[these] = np.average(ratios[these], weights=weights[these])
        at_s = stretches[int(np.argmax(these))].at_s
        if not pieces or at_s > pieces[-1][0]:
            pieces.append((at_s, float(1 / slowness[these][0])))
    return LoadFound(slowness, np.ones(len(ratios), dtype=np.bool_), None, tuple(pieces))
