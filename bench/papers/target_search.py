"""The search for the best local steps and learning rate: a grid that grows until its best point lies inside it.

Nothing here runs anything. A search is a generator: it yields what it wants to know, is sent the seconds, and returns
what it found, so that many searches go on beside each other, whose runs go to the processes together.

It halves, for everybody alike: all points of the grid run with the first seed, and of those the best quarter with the
others. Where the best of these lies at an edge of the grid, the grid grows by one there, and the search goes on. One
local step is the least there is, so an optimum there is not an edge.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

TAUS = (1, 2, 5, 10, 20, 40, 80, 160, 320)
RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
"""All that a grid may grow to."""

KEPT = 1 / 4
"""Share of the points that run with all seeds."""


@dataclass(frozen=True, order=True)
class Point:
    """Local steps on average, and the learning rate."""

    tau: int
    rate: float


Asked = tuple[Point, int]
"""A point and a seed."""

Search = Generator[list[Asked], Mapping[Asked, float], "Found"]
"""Sent the seconds to the target of what it asked for, infinite where the target was missed."""


@dataclass(frozen=True)
class Found:
    """The best point.

    Args:
        point: it.
        score: see `score`.
        interior: whether its neighbours were tried on both sides; no more can be below one step.
        tried: points of the grid at its end.
    """

    point: Point
    score: tuple[int, float]
    interior: bool
    tried: int


class Axis:
    """The part of a ladder that has been grown to.

    Args:
        ladder: all values, ascending.
        least, greatest: of the part.
        closed: whether the ladder's first value is the least there is.
    """

    def __init__(self, ladder: Sequence[float], least: float, greatest: float, *, closed: bool) -> None:
        self._ladder, self._closed = ladder, closed
        self._low, self._high = ladder.index(least), ladder.index(greatest)

    @property
    def values(self) -> Sequence[float]:
        return self._ladder[self._low : self._high + 1]

    def inside(self, best: float) -> bool:
        """Whether a value has neighbours on both sides, or none is possible."""
        place = self._ladder.index(best)
        return (self._low < place or (self._closed and place == 0)) and place < self._high

    def grow(self, best: float) -> bool:
        """Take in the neighbour of a value at an edge; False where there is none to take in."""
        place, before = self._ladder.index(best), (self._low, self._high)
        if place == self._low:
            self._low = max(self._low - 1, 0)
        if place == self._high:
            self._high = min(self._high + 1, len(self._ladder) - 1)
        return (self._low, self._high) != before


def score(seconds: Sequence[float]) -> tuple[int, float]:
    """The less the better: first how many seeds missed the target, then the mean logarithm of the others' seconds."""
    reached = [math.log(each) for each in seconds if math.isfinite(each)]
    return len(seconds) - len(reached), math.fsum(reached) / len(reached) if reached else math.inf


def search(seeds: Sequence[int], *, small: bool = False) -> Search:
    """Find the best point.

    Args:
        seeds: the first is that of all points.
        small: begin with three values of each instead of six and three, and do not grow.
    """
    tau = Axis(TAUS, *((5, 20) if small else (1, 40)), closed=True)
    rate = Axis(RATES, 0.03, 0.3, closed=False)
    known: dict[Asked, float] = {}

    def wanted(points: Sequence[Point], of: Sequence[int]) -> list[Asked]:
        return [asked for asked in product(points, of) if asked not in known]

    while True:
        points = [Point(int(steps), each) for steps, each in product(tau.values, rate.values)]
        known |= yield wanted(points, seeds[:1])
        first = sorted(points, key=lambda point: (known[point, seeds[0]], point))
        kept = first[: math.ceil(KEPT * len(points))]
        known |= yield wanted(kept, seeds[1:])
        scores = {point: score([known[point, seed] for seed in seeds]) for point in kept}
        best = min(kept, key=lambda point: (scores[point], point))
        interior = tau.inside(best.tau) and rate.inside(best.rate)
        grown = False if small else any([tau.grow(best.tau), rate.grow(best.rate)])
        if not grown:
            return Found(best, scores[best], interior, len(points))
