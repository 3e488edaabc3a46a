"""Balancers without speed forecasts: ``leader-straggler`` by round times, and ``spend-evenly`` by privacy budgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import log, sqrt
from statistics import fmean
from typing import Annotated

import numpy as np
from annotated_types import Gt, Le, Lt
from numpy.typing import NDArray

from fedsync.core.orders import LocalWork
from fedsync.core.protocols import Bounds, RoundSeen
from fedsync.core.speed.curve import Curve
from fedsync.core.speed.sizing import Sizing
from fedsync.policies.balance.balancer_base import SharingBalancer
from fedsync.policies.balance.by_forecast import ProportionalBalancer
from fedsync.policies.balance.rounding import in_multiples
from fedsync.policies.schema import PositiveInt, Settings, Share, register


@dataclass(frozen=True, slots=True)
class MovePace(Settings):
    """Pace at which samples move from the slowest silo to the fastest."""

    step: PositiveInt
    """Samples per move."""

    window: PositiveInt
    """Number of rounds in a row in which the fastest silo must be ahead of the slowest before a move."""


@dataclass(frozen=True, slots=True)
class Search:
    """State of `LeaderStraggler`.

    Args:
        sizes: batch size of each silo in the current round [samples].
        rounds: seconds of each silo per round, the newest last; at most the longest window.
        reported: stragglers that were reported because their batch cannot shrink.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    rounds: tuple[Mapping[str, float], ...] = ()
    fine: bool = False
    reported: frozenset[str] = frozenset()


@register("leader-straggler")
@dataclass(frozen=True, slots=True)
class LeaderStraggler(SharingBalancer):
    """Balancer that moves samples from the slowest silo to the fastest, by the measured round times: LB-BSP for GPUs.

    It needs no curve. The leader has the least time of the last round, the straggler the most. If the leader was faster
    in every round of the window, `step` samples move from straggler to leader. If the leader was slower in a remembered
    round, the two have changed places, and the `fine` pace holds from then on.

    Cases that the paper leaves open: a round in which one of the two silos has no time does not count as a lead. Only
    the rounds of the longest window are remembered. A silo that cannot take the step within its bounds, or whose memory
    is nearly full, is no leader.

    Source: LB-BSP, Algorithm 2 (section 3.3.2).
    """

    fast: MovePace = field(default_factory=lambda: MovePace(step=5, window=5))
    """Pace until two silos have changed places."""

    fine: MovePace = field(default_factory=lambda: MovePace(step=1, window=20))
    """Pace after two silos have changed places."""

    memory: Share = 0.95
    """Memory use above which a silo gets no more samples, as a share of its memory."""

    needs_lockstep = True

    def sizing(self, work: LocalWork) -> Sizing:
        return Sizing(work, floor=self.floor, cap=self.cap, adaptive=self, fitter=self.curve.fitter())

    def init(self) -> Search:
        return Search()

    def advance(self, state: Search, seen: RoundSeen) -> tuple[Search, tuple[str, ...]]:
        longest = max(self.fast.window, self.fine.window)
        rounds = (*state.rounds, dict(seen.seconds))[-longest:] if seen.seconds else state.rounds
        now = replace(state, sizes=self._sizes(state, seen), rounds=rounds)
        pace = self.fine if state.fine else self.fast
        step = -(-pace.step // self.multiple) * self.multiple
        pair = self._pair(now, seen, step)
        if pair is None:
            return now, ()
        leader, straggler = pair
        size, floor = now.sizes[straggler], int(seen.bounds.floor[seen.names.index(straggler)])
        if size - step < max(floor, 1):
            if straggler in state.reported:
                return now, ()
            note = f"{straggler} is the slowest, and its {size} samples a step cannot be {step} fewer: leave it out"
            return replace(now, reported=state.reported | {straggler}), (note,)
        if len(rounds) >= pace.window and all(_ahead(leader, straggler, times) for times in rounds[-pace.window :]):
            moved = {leader: now.sizes[leader] + step, straggler: size - step}
            return replace(now, sizes={**now.sizes, **moved}), ()
        if not state.fine and any(_ahead(straggler, leader, times) for times in rounds):
            return replace(now, fine=True), (f"{leader} and {straggler} changed places: batch sizes are fine-tuned",)
        return now, ()

    def plan(self, state: Search, names: Sequence[str], total: int, bounds: Bounds) -> NDArray[np.int64]:
        """Sizes as `Balancer.plan`, as close to ``state.sizes`` as possible; an unknown silo starts at the mean."""
        mean = total // len(names)
        wanted = np.array([state.sizes.get(name, mean) for name in names], dtype=np.int64) // self.multiple
        return in_multiples(self.multiple, total, bounds, lambda count, units: _nearest(wanted, count, units))

    def _sizes(self, state: Search, seen: RoundSeen) -> dict[str, int]:
        sizes = self.plan(state, seen.names, seen.total, seen.bounds)
        return dict(zip(seen.names, sizes.tolist(), strict=True))

    def _pair(self, now: Search, seen: RoundSeen, step: int) -> tuple[str, str] | None:
        known = [name for name in seen.names if name in seen.seconds]
        caps = dict(zip(seen.names, seen.bounds.cap.tolist(), strict=True))
        able = [
            name for name in known if now.sizes[name] + step <= caps[name] and seen.memory.get(name, 0.0) <= self.memory
        ]
        if not able:
            return None
        leader, straggler = min(able, key=seen.seconds.__getitem__), max(known, key=seen.seconds.__getitem__)
        return (leader, straggler) if leader != straggler else None


def _nearest(wanted: NDArray[np.int64], total: int, bounds: Bounds) -> NDArray[np.int64]:
    """Return sizes within bounds that sum to ``total``; the difference is shared evenly among silos with room."""
    sizes = np.clip(wanted, bounds.floor, bounds.cap)
    while (missing := total - int(sizes.sum())) != 0:
        free = np.flatnonzero(sizes < bounds.cap if missing > 0 else sizes > bounds.floor)
        share = np.full(len(free), abs(missing) // len(free), dtype=np.int64)
        share[: abs(missing) % len(free)] += 1
        sizes[free] += np.sign(missing) * share
        sizes = np.clip(sizes, bounds.floor, bounds.cap)
    return sizes


def _ahead(one: str, other: str, seconds: Mapping[str, float]) -> bool:
    return one in seconds and other in seconds and seconds[one] < seconds[other]


Epsilon = Annotated[float, Gt(0), Le(100)]
Delta = Annotated[float, Gt(0), Lt(1)]


@register("spend-evenly")
@dataclass(frozen=True, slots=True)
class SpendEvenly(SharingBalancer):
    """Batch sizes in proportion to a silo's rows and to what its privacy budget has room for; speeds do not count.

    For private runs with a ``noise_multiplier``. A step of a batch B on N rows has the sampling rate q = B / N, and
    costs about q² in zero-concentrated differential privacy. There, an epsilon has room for ``(sqrt(L + epsilon) -
    sqrt(L))²`` with ``L = log(1 / delta)``. So budgets end together if q is in proportion to the root of that room.
    Large budgets end first with noise multipliers below about 1.5 and high rates, where q² is too little. Silos of
    unequal steps, or a barrier that ends orders early, also make budgets end at different rounds.

    The server sees no ledgers, so subtract what other runs have spent from these numbers. Each silo's ledger decides.

    Source: Bun and Steinke 2016 (arXiv:1605.02065), proposition 1.3; for sampling, Mironov et al. 2019
    (arXiv:1908.10530), whose divergence grows with q² to leading order.
    """

    budgets: dict[str, Epsilon] = field(default_factory=dict)
    """Epsilon that each silo's owner has declared for the run, by the silo's name. Silos that are left out count as the
    largest of these; without any budget, all silos have equal sampling rates."""

    delta: Delta = 1e-5
    """Probability that belongs to the budgets."""

    spends = True

    @property
    def named(self) -> Mapping[str, float]:
        return self.budgets

    def sizing(self, work: LocalWork) -> Sizing:
        return Sizing(work, floor=self.floor, cap=self.cap, adaptive=self)

    def init(self) -> Mapping[str, int]:
        return {}

    def advance(self, state: Mapping[str, int], seen: RoundSeen) -> tuple[Mapping[str, int], tuple[str, ...]]:
        return dict(seen.examples), ()

    def plan(self, state: Mapping[str, int], names: Sequence[str], total: int, bounds: Bounds) -> NDArray[np.int64]:
        usual = fmean(state.values()) if state else 1.0
        most = max(self.budgets.values(), default=1.0)
        weights = [max(state.get(name, usual), 1.0) * self._room(self.budgets.get(name, most)) for name in names]
        curves = [Curve(weight) for weight in weights]
        share = ProportionalBalancer(rounding="largest-remainder").plan
        return in_multiples(self.multiple, total, bounds, lambda count, units: share(curves, count, units))

    def _room(self, epsilon: float) -> float:
        """Root of the room that an epsilon has in zero-concentrated differential privacy."""
        least = log(1.0 / self.delta)
        return sqrt(least + epsilon) - sqrt(least)
