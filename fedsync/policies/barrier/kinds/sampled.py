"""Probabilistic synchronous parallel: BSP and SSP that look at a few silos instead of all.

A silo's *lag* behind another is how many orders fewer it has done. SSP lets nobody be more than s ahead of the slowest,
so one slow silo holds everybody. PSP asks of beta others, drawn at random, whether one of them lags by more than s.
The slowest is seldom drawn where beta is small, so most go on, and yet nobody runs away: with n silos the chance to
miss all of k laggards is about (1 - k/n)^beta at each look, and it is looked again with each arrival. So the mean lag
stays bounded, where ASP's grows without end.

| state of a silo | what happened | decision | next |
|---|---|---|---|
| at work | its update arrives | it is committed at once | idle |
| idle, at most s ahead of the slowest | | released without a draw | at work |
| idle, further ahead | nobody in its sample lags by more than s | released | at work |
| idle, further ahead | somebody does | held | waiting |
| waiting | an update arrives | a new sample, or what is left of the old one (``basic``, no ``redraw``) | as idle |
| idle | its order failed | held until the next commit, or until nobody is at work | as idle |
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import inf
from random import Random

import numpy as np

from fedsync.common.rng import Stream, derive_seed, draw
from fedsync.core.views import ClusterView, Verdict
from fedsync.policies.barrier.barrier_base import BarrierPolicy
from fedsync.policies.barrier.kinds.ssp import Clocks, Failures, advance, commit_next, failed, ready, told
from fedsync.policies.schema import Choice, Count, register


@dataclass(frozen=True, slots=True)
class Pools:
    """Silos to draw from: all of one view, or its fast and its slow ones."""

    fast: Sequence[str]
    slow: Sequence[str]
    quick: frozenset[str] = field(init=False)
    """The fast ones, to be looked up."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "quick", frozenset(self.fast))


class Sampling(Choice):
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

    def pools(self, view: ClusterView) -> Pools:
        """The silos from which `draw` takes one half each, in orders that only the view decides."""
        names = view.names
        if self is not Sampling.GROUPED:
            return Pools((), names)
        return Pools(*two_groups({name: _step_s(name, view) for name in names}))

    def draw(
        self,
        pools: Pools,
        size: int,
        view: ClusterView,
        silo: str,
        ticks: int,
        keeps: bool,
    ) -> tuple[str, ...]:
        """``size`` of the silos but ``silo``, without replacement, in O(size).

        Args:
            pools: of the same view.
            size: beta; all others, if there are fewer.
            view: for the seed and the model version.
            silo: for whom.
            ticks: the orders that it has done.
            keeps: not another sample for each model version.
        """
        coordinates = silo if keeps else f"{view.version}/{silo}"
        key = derive_seed(view.seed, Stream.SAMPLE, coordinates, 0 if self is Sampling.BASIC else ticks)
        fast, slow = pools.fast, pools.slow
        if not fast:
            return _few(slow, size, silo, key)
        others_fast = len(fast) - (silo in pools.quick)
        others_slow = len(fast) + len(slow) - 1 - others_fast
        from_fast = max(min(size // 2, others_fast), size - others_slow)
        return _few(fast, from_fast, silo, key) + _few(slow, size - from_fast, silo, key)


def _few(names: Sequence[str], size: int, but: str, key: int) -> tuple[str, ...]:
    """``size`` of ``names``, but not ``but``, uniformly without replacement; all of them, if there are no more.

    Draws places until there are enough different ones, eight from each hash of (key, 0), (key, 1) and so on. For four
    that takes 3 us, where setting up a generator alone takes 9; of half the names and more it takes one nevertheless.
    """
    if 2 * size >= len(names):
        others = [name for name in names if name != but]
        return tuple(others if size >= len(others) else Random(key).sample(others, size))
    drawn: dict[str, None] = {}
    block = 0
    while len(drawn) - (but in drawn) < size:
        for (number,) in struct.iter_unpack(">Q", blake2b(b"%d/%d" % (key, block)).digest()):
            # The number of names does not divide 2^64, which favours some by less than 1 in 10^14.
            drawn[names[number % len(names)]] = None
        block += 1
    drawn.pop(but, None)
    return tuple(drawn)[:size]


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
class WatchedSample:
    """Whom a waiting silo still watches, drawn when it had done ``ticks`` orders."""

    ticks: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SampledState:
    """Of `Sampled`.

    Args:
        clocks: of all silos.
        failures: of idle silos.
        waiting: whom those watch that wait and keep their samples.
        news: `Index.news` when they were looked at, None if there was no index.
    """

    clocks: Clocks = field(default_factory=Clocks)
    failures: Failures = field(default_factory=dict)
    waiting: Mapping[str, WatchedSample] = field(default_factory=dict)
    news: int | None = None


@register("sampled")
@dataclass(frozen=True, slots=True)
class Sampled(BarrierPolicy[SampledState]):
    """Wait only when more than ``staleness`` orders ahead of one of ``sample_size`` others.

    Each update is committed as it arrives. When a silo has finished an order, beta of the others are drawn without
    replacement. It waits while one of them lags more than ``staleness`` orders behind it. It looks again whenever an
    update has arrived, and then at others: a draw depends on the run's seed, the silo, the orders it has done and the
    model version, so that a wake-up at which nothing has arrived draws nothing anew. A ``basic`` sample is always the
    same. Whoever is gone is not waited for. The slowest silo never waits, so somebody always works.

    beta = 0 is `Asp`; beta = n - 1 is `Ssp`; staleness 0 is pBSP, above that pSSP.

    Without ``redraw`` whoever a silo has seen close enough is not looked at again. Then a silo that lags is missed by
    nobody who has drawn it: less spread, down to a silo that is slow for good setting everybody's pace, and less
    progress.

    Source: PSP, sections 10.4.1 and 10.5.2; the barrier function there samples whenever it is evaluated. There a
    worker may draw itself, which tells it nothing; here it draws from the others. What stays fixed in ``basic``
    is each silo's own sample, not one for all: one for all would let its members never wait for the rest.
    """

    sample_size: Count
    """Silos that a silo looks at; beta in the paper. 0 is ``asp``, all others ``ssp``."""

    staleness: Count = 0
    """Orders that a silo may be ahead of those; 0 is pBSP, more is pSSP."""

    sampling: Sampling = Sampling.DYNAMIC
    """``basic`` always looks at the same, ``dynamic`` draws anew, ``grouped`` draws half from the fast and half from
    the slow."""

    redraw: bool = True
    """Whether a waiting silo looks at others whenever an update arrives; else it waits for its first sample."""

    @property
    def most_updates(self) -> int:
        return 1

    @property
    def symmetric(self) -> bool:
        """Whether there is nothing to draw; names decide what is drawn."""
        return self.sample_size == 0

    @property
    def named_silos(self) -> dict[str, int]:
        return {"sample_size": self.sample_size}

    def init(self) -> SampledState:
        return SampledState()

    def decide(self, state: SampledState, view: ClusterView) -> tuple[SampledState, Verdict]:
        """Commit what is there, one by one; then release whoever no longer waits.

        O(beta) for each silo that waits, and O(n log n) for all of them if ``grouped``.
        """
        if view.pending:
            return state, commit_next(view)
        clocks = advance(state.clocks, view, view.changed_since(state.news))
        idle = view.idle
        failures = failed(state.failures, idle, view)
        keeps = not self.redraw or self.sampling is Sampling.BASIC
        pools: Pools | None = None
        waiting: dict[str, WatchedSample] = {}
        release: list[str] = []
        held = 0
        for name in ready(failures, idle, view):
            ticks = clocks[name].ticks
            if ticks - clocks.slowest <= self.staleness:
                release.append(name)  # whoever is drawn is close enough
                continue
            watch = state.waiting.get(name)
            if watch is not None and watch.ticks == ticks:
                names = watch.names
            else:
                pools = pools or self.sampling.pools(view)
                names = self.sampling.draw(pools, self.sample_size, view, name, ticks, keeps)
            left = _behind(names, clocks, ticks - self.staleness)
            if not left:
                release.append(name)
                continue
            held += 1
            if keeps:
                waiting[name] = WatchedSample(ticks, left)
        return SampledState(clocks, failures, waiting, view.news), Verdict(
            release=tuple(release), reason=told(tuple(release), held, self.staleness)
        )


def _behind(names: tuple[str, ...], clocks: Clocks, least: int) -> tuple[str, ...]:
    """``names`` from the first one on that is here and has done fewer than ``least`` orders.

    Looking at the first only, as long as that one lags, makes a decision O(n) however many wait.
    """
    for index, name in enumerate(names):
        tick = clocks.get(name)
        if tick is not None and tick.ticks < least:
            return names[index:]
    return ()
