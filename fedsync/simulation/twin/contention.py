"""Load of others in a series of step times: none, two states that last, or whatever it is, as a trace.

Times that only jitter do not follow each other; load does, for it stays. So a series whose neighbours are alike is
loaded. Where two levels say nearly all of it, it is a two-state Markov chain, else a trace.
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
"""Points below which nothing is called load."""

LEAST = 0.1
"""Logarithm of slow over fast below which nothing is called two states."""

TWO_STATES = 0.15
"""Share of the squares within two states below which they are two; even spread that is cut in two has 0.25."""


@dataclass(frozen=True, slots=True)
class TwoStates:
    """Load that is there or not.

    Args:
        factor: of speed while it is.
        on_s: mean seconds that it stays.
        off_s: mean seconds until it comes again.
        on: times that it was seen to go.
        off: times that it was seen to come.
    """

    factor: float
    on_s: float
    off_s: float
    on: int
    off: int


@dataclass(frozen=True, slots=True)
class LoadFound:
    """What a series shows.

    Args:
        slowness: by which each point's time is to be divided to be free of load, float64 [points].
        clean: points whose load is known well, bool [points].
        states: if it has two.
        pieces: the trace of speed, if it has more.
    """

    slowness: Floats
    clean: NDArray[np.bool_]
    states: TwoStates | None = None
    pieces: tuple[Piece, ...] = ()


def find_load(stretches: Sequence[Stretch], ratios: Floats) -> LoadFound:
    """What load a series shows.

    Args:
        stretches: points, by time.
        ratios: of each, its time over what the idle machine takes, float64 [points].
    """
    count, logs = len(ratios), np.log(ratios)
    idle = LoadFound(np.ones(count), np.ones(count, dtype=np.bool_))
    centred = logs - logs.mean()
    squares = float(centred @ centred)
    if count < FEWEST or squares < count * 1e-6 or float(centred[1:] @ centred[:-1]) / squares < 2 / count**0.5:
        return idle
    slow = logs > _cut(np.sort(logs))
    # A point that a change falls into has a bit of both.
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
    """Between the two groups with the least squares within."""
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
    """One factor an order: what is left within an order is jitter."""
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
