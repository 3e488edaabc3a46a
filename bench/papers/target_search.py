"""The search for the best local steps and learning rate: a grid that grows until its best point lies inside it.

This module runs nothing. A search is a generator. It yields the point to measure and the longest time worth waiting for
it, is sent the seconds, and returns the best point. So many searches can proceed side by side.

It uses successive halving, for all alike: all points of the grid run with the first third of the seeds, and the best
quarter with the others, too. If the best of these lies at an edge of the grid, the grid grows by one there, and the
search continues. One local step is the minimum, so an optimum there is not an edge.

Runs that cannot change the outcome are cut short. A point is dropped if, even if its remaining seeds took no time, it
would be behind enough points to fill the best quarter, or, in that quarter, behind the best so far. Such a run ends at
that bound, and its point is known to be slower. The winning point and its score are those of a search without bounds (a
test in ``tests/test_target.py``).
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

TAUS = (1, 2, 5, 10, 20, 40, 80, 160, 320)
RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""All that a grid may grow to."""

FIRST_SEEDS = 1 / 3
"""Share of the seeds that all points run with."""

KEPT = 1 / 4
"""Share of the points that run with all seeds."""

_ROUNDING = 1 + 1e-9
"""Bounds are wider by this than arithmetic makes them, so that what ends at one is no tie."""


@dataclass(frozen=True, order=True)
class Point:
    """Local steps on average, and the learning rate."""

    tau: int
    rate: float


FIRST = Point(5, 0.1)
"""Tried first where nothing is known of better ones; the order changes what a search costs, not what it finds."""


@dataclass(frozen=True)
class Seen:
    """What is known of a point with a seed.

    Args:
        seconds: to the target, infinite where it was missed.
        more: it takes longer than these; nobody knows how long.
        rounds: to the target; 0 where it was missed, or where nobody knows.
    """

    seconds: float
    more: bool = False
    rounds: int = 0

    def settles(self, within: float) -> bool:
        """Whether it says all that matters to who would wait so many seconds."""
        return not self.more or self.seconds >= within


Asked = tuple[Point, int]
"""A point and a seed."""

Known = dict[Asked, Seen]
Asking = Generator[dict[Asked, float], Mapping[Asked, Seen], "tuple[Point, Score]"]
Search = Generator[dict[Asked, float], Mapping[Asked, Seen], "Found"]
"""Yields the seconds up to which each answer matters, which must `Seen.settles` them."""

Score = tuple[int, float]


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
    score: Score
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


def score(seconds: Sequence[float]) -> Score:
    """The less the better: first how many seeds missed the target, then the mean logarithm of the others' seconds."""
    reached = [math.log(each) for each in seconds if math.isfinite(each)]
    return len(seconds) - len(reached), math.fsum(reached) / len(reached) if reached else math.inf


def worth(best: Score, seen: Sequence[float], left: int, least: float) -> float:
    """Seconds beyond which the next seed tells nothing: with more, a point is behind the best one, whatever follows.

    Args:
        best: score to beat.
        seen: seconds with the seeds that the point ran with.
        left: seeds without a result, the next one among them.
        least: seconds that no run goes below.
    """
    missed, mean = best
    mine = sum(math.isinf(each) for each in seen)
    if mine != missed:
        return 0.0 if mine > missed else math.inf
    # It must reach the target with all that are left, and the others of them take `least` at best.
    behind = math.fsum(math.log(each) for each in seen if math.isfinite(each))
    room = mean * (len(seen) + left - missed) - behind - (left - 1) * math.log(least)
    return math.exp(min(room, 700.0)) * _ROUNDING


def search(seeds: Sequence[int], *, small: bool = False, near: Point = FIRST, least: float = 1e-3) -> Search:
    """Find the best point.

    Args:
        seeds: all points run with the first third of them.
        small: begin with three values of each instead of six and three, and do not grow.
        near: points close to this one run first.
        least: seconds that no run goes below.
    """
    tau = Axis(TAUS, *((5, 20) if small else (1, 40)), closed=True)
    rate = Axis(RATES, 0.03, 0.3, closed=False)
    known: Known = {}
    best = near
    while True:
        points = [Point(int(steps), each) for steps, each in product(tau.values, rate.values)]
        points.sort(key=lambda point: (_apart(point, best), point))
        first = seeds[: math.ceil(FIRST_SEEDS * len(seeds))]
        kept = yield from _quarter(points, first, math.ceil(KEPT * len(points)), known, least)
        best, found = yield from _best(kept, seeds, known, least)
        interior = tau.inside(best.tau) and rate.inside(best.rate)
        grown = False if small else any([tau.grow(best.tau), rate.grow(best.rate)])
        if not grown:
            return Found(best, found, interior, len(points))


def _apart(one: Point, other: Point) -> int:
    """Places between two points of the grid."""
    steps = abs(TAUS.index(one.tau) - TAUS.index(other.tau))
    return steps + abs(RATES.index(one.rate) - RATES.index(other.rate))


def _quarter(
    points: Sequence[Point], seeds: Sequence[int], count: int, known: Known, least: float
) -> Generator[dict[Asked, float], Mapping[Asked, Seen], list[Point]]:
    """The ``count`` best points with these seeds, the best first; ties go to the lesser point."""
    while True:
        done = sorted((found, p) for p in points if (found := _score_of(p, seeds, known)) is not None)
        bar = done[count - 1][0] if len(done) >= count else (len(seeds) + 1, math.inf)
        open_ones = [each for p in points if (each := _next_of(p, seeds, bar, known, least)) is not None]
        if not open_ones:
            return [point for _, point in done[:count]]
        # Those that were given up while the grid was smaller come last, the nearest to their bound first.
        asked, within = min(open_ones, key=lambda each: known[each[0]].seconds if each[0] in known else 0.0)
        known |= yield {asked: within}


def _best(kept: Sequence[Point], seeds: Sequence[int], known: Known, least: float) -> Asking:
    """The best point with all seeds, and its score; ties go to the lesser point."""
    best: tuple[Score, Point] = (len(seeds), math.inf), Point(max(TAUS) + 1, math.inf)
    for point in kept:
        while (more := _next_of(point, seeds, best[0], known, least)) is not None:
            known |= yield {more[0]: more[1]}
        if (found := _score_of(point, seeds, known)) is not None:
            best = min(best, (found, point))
    return best[1], best[0]


def _score_of(point: Point, seeds: Sequence[int], known: Known) -> Score | None:
    """Score of a point; None until it ran to the end with all seeds."""
    results = [known.get((point, seed)) for seed in seeds]
    done = [each.seconds for each in results if each is not None and not each.more]
    return score(done) if len(done) == len(seeds) else None


def _next_of(point: Point, seeds: Sequence[int], best: Score, known: Known, least: float) -> tuple[Asked, float] | None:
    """The next run of a point, and the seconds up to which it matters; None if all ran or it is behind ``best``."""
    results = {seed: known.get((point, seed)) for seed in seeds}
    done = [each.seconds for each in results.values() if each is not None and not each.more]
    unsettled = [seed for seed, each in results.items() if each is None or each.more]
    within = worth(best, done, len(unsettled), least)
    behind = any(each is not None and each.more and each.settles(within) for each in results.values())
    return None if not unsettled or behind or within < least else ((point, unsettled[0]), within)
