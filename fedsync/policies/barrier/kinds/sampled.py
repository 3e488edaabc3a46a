"""Probabilistic synchronous parallel (PSP): BSP and SSP that check a sample of the silos instead of all.

A silo's *lag* behind another silo says how many more orders the other silo has done. SSP lets no silo be more than s
orders ahead of the slowest, so one slow silo holds all other silos. PSP draws beta other silos at random and checks
whether one of them lags by more than s. With a small beta, the slowest silo is seldom drawn, so most silos continue.
Still, no silo gets far ahead: with n silos, a check misses all of k laggards with probability about (1 - k/n)^beta, and
each arrival triggers a new check. So the mean lag stays bounded; in ASP it grows without bound.

| state of a silo | event | decision | next |
|---|---|---|---|
| busy | its update arrives | the update is committed at once | idle |
| idle, at most s ahead of the slowest | | released without a draw | busy |
| idle, further ahead | no silo in its sample lags by more than s | released | busy |
| idle, further ahead | a silo in its sample lags by more than s | held | waiting |
| waiting | an update arrives | a new sample, or the rest of the old sample (``basic``, no ``redraw``) | as idle |
| idle | its order failed | held until the next commit, or until no silo is busy | as idle |
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
    """Silos to draw from: all silos of a view (``slow``), or its fast and slow silos."""

    fast: Sequence[str]
    slow: Sequence[str]
    quick: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "quick", frozenset(self.fast))


class Sampling(Choice):
    """Method of drawing a sample.

    - ``basic``: one draw; the sample changes only when a silo joins or leaves.
    - ``dynamic``: a new sample each time.
    - ``grouped``: a new sample each time, half from the fast and half from the slow silos. The odd silo comes from the
      slow group; a group that is too small is filled up from the other.

    Source: PSP, sections 10.5.2 and 10.6.3.
    """

    BASIC = "basic"
    DYNAMIC = "dynamic"
    GROUPED = "grouped"

    def choose(self, names: Iterable[str], size: int, view: ClusterView, round: int = 0) -> tuple[str, ...]:
        """Draw ``size`` (beta) of ``names`` without replacement; all if there are fewer. The result depends on (run
        seed, round), on ``names`` and, if grouped, on the forecasts.
        """
        match self:
            case Sampling.BASIC:
                return draw(names, size, view.seed, Stream.SAMPLE)
            case Sampling.DYNAMIC:
                return draw(names, size, view.seed, Stream.SAMPLE, round)
            case Sampling.GROUPED:
                fast, slow = two_groups({name: _step_s(name, view) for name in names})
                from_fast = max(min(size // 2, len(fast)), size - len(slow))
                return (
                    *draw(fast, from_fast, view.seed, Stream.SAMPLE, round),
                    *draw(slow, size - from_fast, view.seed, Stream.SAMPLE, round),
                )

    def pools(self, view: ClusterView) -> Pools:
        names = view.names
        if self is not Sampling.GROUPED:
            return Pools((), names)
        return Pools(*two_groups({name: _step_s(name, view) for name in names}))

    def draw(self, pools: Pools, size: int, view: ClusterView, silo: str, ticks: int, keeps: bool) -> tuple[str, ...]:
        """Draw ``size`` (beta) of the silos other than ``silo``, which has done ``ticks`` orders; all if there are
        fewer. With ``keeps``, the sample stays the same across model versions. O(size).
        """
        coordinates = silo if keeps else f"{view.version}/{silo}"
        key = derive_seed(view.seed, Stream.SAMPLE, coordinates, 0 if self is Sampling.BASIC else ticks)
        fast, slow = pools.fast, pools.slow
        if not fast:
            return _few(slow, size, silo, key)
        others_fast = len(fast) - (silo in pools.quick)
        others_slow = len(fast) + len(slow) - 1 - others_fast
        from_fast = max(min(size // 2, others_fast), size - others_slow)
        # Another key: with one key, both draws would choose the same positions of their group.
        return _few(fast, from_fast, silo, key ^ 1) + _few(slow, size - from_fast, silo, key)


def _few(names: Sequence[str], size: int, but: str, key: int) -> tuple[str, ...]:
    """Draw ``size`` of ``names`` without ``but``, uniformly without replacement; all if there are no more. Each hash
    gives eight positions: faster than setting up a generator for small samples.
    """
    if 2 * size >= len(names):
        others = [name for name in names if name != but]
        return tuple(others if size >= len(others) else Random(key).sample(others, size))
    drawn: dict[str, None] = {}
    block = 0
    while len(drawn) - (but in drawn) < size:
        for (number,) in struct.iter_unpack(">Q", blake2b(b"%d/%d" % (key, block)).digest()):
            # The number of names does not divide 2^64; the bias is less than 1 in 10^14.
            drawn[names[number % len(names)]] = None
        block += 1
    drawn.pop(but, None)
    return tuple(drawn)[:size]


def _step_s(name: str, view: ClusterView) -> float:
    forecast = view.silos[name].forecast
    return inf if forecast is None else forecast.step_s(view.work[name].batch_size)


def two_groups(step_s: Mapping[str, float]) -> tuple[list[str], list[str]]:
    """Split names into fast and slow silos by 2-means on their step times [s]; O(n log n).

    In one dimension, two clusters are a cut in the sorted times. The best of the n - 1 cuts has the least sum of
    squares, ``sum t^2 - (sum t)^2 / count`` on each side: the exact optimum. If all times are equal, all silos count as
    slow. An infinite time counts as slow.
    """
    names = sorted(step_s, key=lambda name: (step_s[name], name))
    times = np.array([step_s[name] for name in names])
    times = times[np.isfinite(times)]
    if len(times) == 0 or times[0] == times[-1]:
        known = len(times) if len(times) < len(names) else 0
        return names[:known], names[known:]
    times = times / times[-1]  # keeps the squares in range for any unit
    counts = np.arange(1, len(times))
    left, right = np.cumsum(times)[:-1], np.cumsum(times[::-1])[::-1][1:]
    # The total of squares is the same for every cut.
    cut = int(np.argmax(left**2 / counts + right**2 / (len(times) - counts))) + 1
    return names[:cut], names[cut:]


@dataclass(frozen=True, slots=True)
class WatchedSample:
    """Silos that a waiting silo still watches, drawn when it had done ``ticks`` orders."""

    ticks: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SampledState:
    """State of `Sampled`; ``waiting`` holds kept samples."""

    clocks: Clocks = field(default_factory=Clocks)
    failures: Failures = field(default_factory=dict)
    waiting: Mapping[str, WatchedSample] = field(default_factory=dict)


@register("sampled")
@dataclass(frozen=True, slots=True)
class Sampled(BarrierPolicy[SampledState]):
    """Barrier in which a silo waits only while more than ``staleness`` orders ahead of one of ``sample_size`` others.

    Each update is committed as it arrives. When a silo has finished an order, the barrier draws beta of the others
    without replacement. The silo waits while one of them lags more than ``staleness`` orders behind it. Each arriving
    update triggers a new check with a new sample. A draw depends on the run's seed, the silo, its finished orders and
    the model version, so a wake-up without an arrival repeats the last draw. A ``basic`` sample never changes. Silos
    that have left are ignored. The slowest silo never waits, so at least one silo always works.

    beta = 0 is `Asp`; beta = n - 1 is `Ssp`; staleness 0 is pBSP, above that pSSP.

    Without ``redraw``, each silo that has drawn a laggard waits for it. The spread is smaller, but a permanently slow
    silo sets the pace of all.

    Source: PSP, sections 10.4.1 and 10.5.2. ``basic`` fixes one sample per silo, not one sample for all: members of a
    shared sample would never wait for the other silos.
    """

    sample_size: Count
    """Number of other silos that a silo checks; beta in the paper. 0 is ``asp``, all others is ``ssp``."""

    staleness: Count = 0
    """Orders that a silo may be ahead of the silos in its sample; 0 is pBSP, more is pSSP."""

    sampling: Sampling = Sampling.DYNAMIC
    """Method of drawing the sample: ``basic`` keeps one sample, ``dynamic`` draws a new sample each time, ``grouped``
    draws a new sample, half from the fast and half from the slow silos."""

    redraw: bool = True
    """Whether each arriving update gives a waiting silo a new sample; otherwise the silo waits for its first sample."""

    most_updates = 1

    @property
    def named_silos(self) -> dict[str, int]:
        return {"sample_size": self.sample_size}

    def init(self) -> SampledState:
        return SampledState()

    def decide(self, state: SampledState, view: ClusterView) -> tuple[SampledState, Verdict]:
        if view.pending:
            return state, commit_next(view)
        clocks = advance(state.clocks, view)
        idle = view.idle
        failures = failed(state.failures, idle, view)
        keeps = not self.redraw or self.sampling is Sampling.BASIC
        pools: Pools | None = None
        waiting: dict[str, WatchedSample] = {}
        release: list[str] = []
        held = 0
        for name in ready(failures, idle, view):
            ticks = clocks.present[name].ticks
            if ticks - clocks.slowest <= self.staleness:
                release.append(name)  # any sample would be close enough
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
        reason = told(tuple(release), held, self.staleness)
        return SampledState(clocks, failures, waiting), Verdict(release=tuple(release), reason=reason)


def _behind(names: tuple[str, ...], clocks: Clocks, least: int) -> tuple[str, ...]:
    """Return ``names`` from the first present silo with fewer than ``least`` orders. O(1) while it lags."""
    for index, name in enumerate(names):
        tick = clocks.present.get(name)
        if tick is not None and tick.ticks < least:
            return names[index:]
    return ()
