"""Probabilistic synchronous parallel: BSP and SSP that look at a few silos instead of all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

import numpy as np

from fedsync.barrier.ssp import Clocks, advance, commit_next, ready, told
from fedsync.core.rng import Stream, draw
from fedsync.core.views import ClusterView, Verdict


class Sampling(StrEnum):
    """How a sample is chosen.

    - ``basic``: once; it changes only when a silo comes or goes.
    - ``dynamic``: anew each time.
    - ``grouped``: anew each time, one half from the fast silos and one from the slow ones. What an odd size
      has left over comes from the slow, what a group is too small for from the other.

    Source: PSP, sections 10.5.2 and 10.6.3.
    """

    BASIC = "basic"
    DYNAMIC = "dynamic"
    GROUPED = "grouped"

    def choose(
        self, names: Iterable[str], size: int, view: ClusterView, silo: str = "", round: int = 0
    ) -> tuple[str, ...]:
        """``size`` of ``names``, or all if there are fewer, without replacement.

        The choice depends on (run seed, silo, round), on who is there and, if grouped, on the forecasts.

        Args:
            names: to choose from, all of them in ``view``.
            size: beta.
            view: for the seed, and for the step times of the groups.
            silo: for whom.
            round: which of its samples.
        """
        match self:
            case Sampling.BASIC:
                return draw(names, size, view.seed, Stream.SAMPLE, silo)
            case Sampling.DYNAMIC:
                return draw(names, size, view.seed, Stream.SAMPLE, silo, round)
            case Sampling.GROUPED:
                fast, slow = two_groups({name: _step_s(name, view) for name in names})
                from_fast = max(min(size // 2, len(fast)), size - len(slow))
                return (
                    *draw(fast, from_fast, view.seed, Stream.SAMPLE, silo, round),
                    *draw(slow, size - from_fast, view.seed, Stream.SAMPLE, silo, round),
                )


def _step_s(name: str, view: ClusterView) -> float:
    """Predicted seconds of one local step; infinite while nobody knows, so that the silo counts as slow."""
    forecast = view.silos[name].forecast
    return inf if forecast is None else forecast.step_s(view.work[name].batch_size)


def two_groups(step_s: Mapping[str, float]) -> tuple[list[str], list[str]]:
    """Names of the fast and of the slow, by 2-means on their step times [s]; O(n log n).

    On a line the two clusters are a cut in the sorted times, so the best of the n - 1 cuts is the exact
    optimum: the one with the least sum of squares, ``sum t^2 - (sum t)^2 / count`` on each side. Where
    all times are equal there are no groups, and all count as slow. An infinite time is slow.
    """
    names = sorted(step_s, key=lambda name: (step_s[name], name))
    times = np.array([step_s[name] for name in names])
    times = times[np.isfinite(times)]
    if len(times) == 0 or times[0] == times[-1]:
        known = len(times) if len(times) < len(names) else 0
        return names[:known], names[known:]
    times = times / times[-1]  # squares of any unit stay in range
    counts = np.arange(1, len(times))
    left, right = np.cumsum(times)[:-1], np.cumsum(times[::-1])[::-1][1:]
    # The total of squares is the same for every cut.
    cut = int(np.argmax(left**2 / counts + right**2 / (len(times) - counts))) + 1
    return names[:cut], names[cut:]


@dataclass(frozen=True, slots=True)
class Watch:
    """Whom a waiting silo still watches, drawn when it had done ``ticks`` orders."""

    ticks: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SampledState:
    """Clocks of all, and the watch of everybody who waits."""

    clocks: Clocks = field(default_factory=dict)
    waiting: Mapping[str, Watch] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sampled:
    """Commit each update as it arrives; let a silo go on unless one of a few others lags too far behind.

    When a silo has finished an order, beta of the others are drawn without replacement. It waits while
    one of them lags more than ``staleness`` orders behind it. It keeps its sample until it goes on: a
    wake-up draws nothing anew. Whoever it has seen close enough cannot fall back, and is not looked at
    again; whoever is gone is not waited for. The slowest silo never waits, so somebody always works.

    beta = 0 is `Asp`; beta = n - 1 is `Ssp`; staleness 0 is pBSP, above that pSSP.

    Args:
        sample_size: beta.
        staleness: s, in orders.
        sampling: how the sample is chosen.

    Source: PSP, sections 10.4.1 and 10.5.2. There a worker may draw itself, which tells it nothing; here
    it draws from the others. What stays fixed in ``basic`` is each silo's own sample, not one for all: one
    for all would let its members never wait for the rest.
    """

    sample_size: int
    staleness: int = 0
    sampling: Sampling = Sampling.DYNAMIC

    def init(self) -> SampledState:
        """Nobody has been seen."""
        return SampledState()

    def decide(self, state: SampledState, view: ClusterView) -> tuple[SampledState, Verdict]:
        """Commit what is there, one by one; then release whoever no longer waits.

        O(n), and as much again for each silo that begins to wait: its sample is drawn.
        """
        if view.pending:
            return state, commit_next(view)
        clocks = advance(state.clocks, view)
        waiting: dict[str, Watch] = {}
        release: list[str] = []
        slowest = min((tick.ticks for tick in clocks.values()), default=0)
        for name in ready(clocks, view):
            ticks = clocks[name].ticks
            if ticks - slowest <= self.staleness:
                release.append(name)  # whoever is drawn is close enough
                continue
            watch = state.waiting.get(name)
            names = watch.names if watch is not None and watch.ticks == ticks else self._sample(name, ticks, view)
            left = _behind(names, clocks, ticks - self.staleness)
            if left:
                waiting[name] = Watch(ticks, left)
            else:
                release.append(name)
        return SampledState(clocks, waiting), Verdict(
            release=tuple(release), reason=told(tuple(release), len(waiting), self.staleness)
        )

    def _sample(self, name: str, ticks: int, view: ClusterView) -> tuple[str, ...]:
        others = (other for other in view.silos if other != name)
        return self.sampling.choose(others, self.sample_size, view, name, ticks)


def _behind(names: tuple[str, ...], clocks: Clocks, least: int) -> tuple[str, ...]:
    """``names`` from the first one on that is here and has done fewer than ``least`` orders.

    Looking at the first only, as long as that one lags, makes a decision O(n) however many wait.
    """
    for index, name in enumerate(names):
        if name in clocks and clocks[name].ticks < least:
            return names[index:]
    return ()
