"""Steps, balancer and barrier chosen anew while a run goes on, by rehearsing the recent past."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from fedsync.core.fitting import CurveFitter
from fedsync.core.machines import RecordedMachine
from fedsync.core.orders import LocalWork
from fedsync.core.protocols import AnyBarrier, AnyPredictor, Weigher
from fedsync.core.rehearsal import Rehearsal, rehearse
from fedsync.core.sizing import Sizing
from fedsync.core.state import Policies
from fedsync.core.stopping import StopRules
from fedsync.core.tuning import CommitSeen, OrderSeen
from fedsync.policies.balance.base import BalancerPolicy
from fedsync.policies.barrier.base import BarrierPolicy
from fedsync.policies.barrier.wrappers.minimum import MinimumSilos
from fedsync.policies.barrier.wrappers.resting import Resting
from fedsync.policies.predict.ema import Ema
from fedsync.policies.tuning import elasticity
from fedsync.policies.tuning.auto import Auto
from fedsync.policies.tuning.record import KEPT, Lap, Laps, machines

FIRST = 1
"""Commits before the first look."""

NORMS = 2
"""Commits whose norms count."""

MOST_SILOS = 32
"""Silos that are rehearsed; of more, every so many-th by speed."""

STRIDE = 2
"""Largest factor by which the local steps change at once."""

CHANCE = 1.25
"""How many times as long as rehearsed a commit may take before that counts."""

FADING = 0.8
"""What remains, at the next look, of how much longer than rehearsed a way took that is not in use."""


@dataclass(frozen=True, slots=True)
class AutoChoice:
    """How a run goes on.

    Args:
        steps: local steps.
        balancer: its place among those that are tried.
        barrier: likewise.
        pace_s: length of a round, for barriers that have one [s].
    """

    steps: int
    balancer: int = 0
    barrier: int = 0
    pace_s: float | None = None

    @property
    def way(self) -> tuple[int, int]:
        """The choice but for its numbers."""
        return self.balancer, self.barrier


@dataclass(frozen=True, slots=True)
class AutoState:
    """Of an `AutoTuner`.

    Args:
        choice: in force.
        laps: last orders of each silo.
        norms: of the last commits, see `fedsync.policies.tuning.elasticity`.
        first_loss: training loss of the first commit; None before.
        loss: of the last one.
        since_s: when the choice was last looked at, or changed.
        commits: since then.
        samples: since then, in commits, of each silo that was here all the while.
        expected_s: rehearsed seconds a commit of the choice in force; None before the first look.
        delays: way -> how many times as long as rehearsed it took.
        starving: ways that have left a silo less than its share.
    """

    choice: AutoChoice
    laps: Laps = field(default_factory=dict)
    norms: tuple[tuple[float, float], ...] = ()
    first_loss: float | None = None
    loss: float | None = None
    since_s: float = 0.0
    commits: int = 0
    samples: Mapping[str, int] = field(default_factory=dict)
    expected_s: float | None = None
    delays: Mapping[tuple[int, int], float] = field(default_factory=dict)
    starving: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True, slots=True)
class _Promise:
    """What a choice promises: seconds a commit as rehearsed, and progress a second."""

    choice: AutoChoice
    seconds: float
    rate: float


@dataclass(frozen=True, slots=True)
class AutoTuner:
    """Looks at the choice every few commits, and changes it only if another one is clearly better.

    1. Machines are made of the last orders of each silo: the forecast curve, the overhead that the server itself saw,
       and how fast the machine was meanwhile (`fedsync.policies.tuning.record`).
    2. Every pair of balancer and barrier is rehearsed on them with the present number of local steps and with twice as
       many, by the coordinator itself, in virtual time (`fedsync.core.rehearsal`). A line through the two says how long
       a commit takes for any number, and `fedsync.policies.tuning.elasticity` what it brings.
    3. The best number for each pair follows. Of all pairs the one with most progress a second is rehearsed at its
       number, and taken if it promises ``gain`` more than the choice in force.

    Stale updates count less, by the same elasticity. What took longer than rehearsed counts as so much
    longer at later looks, which fades while it is not in use: a silo that claims a speed that it does not have spoils
    a way once, and no rehearsal makes it good again soon. A way that leaves a silo less than ``least_share`` of an
    equal part of the samples, in a rehearsal or in fact, is not taken; batches do not fall below that share either.
    The way that the run begins with may always be taken.

    Args:
        auto: the section of the strategy.
        work: what silos do in the mean at the beginning.
        balancers: that are tried, that of the strategy first.
        barriers: likewise, but first that with which the run begins.
        quorum: silos without which the run does not begin.
        predictor: of the rehearsals.
        weigher: of the run.
        inertia: of the server's optimizer; see `fedsync.policies.optimize.base`.
        by_direction: likewise.
    """

    auto: Auto
    work: LocalWork
    balancers: tuple[BalancerPolicy, ...]
    barriers: tuple[BarrierPolicy[Any], ...]
    quorum: int
    predictor: AnyPredictor
    weigher: Weigher
    inertia: float = 0.0
    by_direction: bool = False

    def init(self) -> AutoState:
        return AutoState(AutoChoice(self.work.steps))

    def observe(self, state: AutoState, seen: OrderSeen) -> AutoState:
        laps = state.laps.get(seen.silo, ())
        return replace(state, laps={**state.laps, seen.silo: (*laps, Lap.of(seen, laps[-1:]))[-KEPT:]})

    def folded(self, state: AutoState, norms: tuple[float, float]) -> AutoState:
        return replace(state, norms=(*state.norms, norms)[-NORMS:])

    def sizing(self, state: AutoState) -> Sizing:
        return self.sized(state.choice)

    def barrier(self, state: AutoState) -> AnyBarrier:
        return MinimumSilos(Resting(self.built(state.choice)), self.quorum)

    def goes_on(self, before: AutoState, after: AutoState) -> bool:
        """With orders queued, if the barrier stays: asked again it would wait for the round that is in work by now."""
        return before.choice.barrier == after.choice.barrier and self.barriers[after.choice.barrier].queues

    def moved(self, before: AutoState, after: AutoState, state: Any) -> Any:
        """The same state, but for that of another barrier, which begins anew; who rests goes on resting."""
        if before.choice.barrier == after.choice.barrier:
            return state
        return replace(state, inner=replace(state.inner, inner=self.built(after.choice).init()))

    def advance(self, state: AutoState, seen: CommitSeen) -> tuple[AutoState, str]:
        state = _counted(state, seen)
        if state.commits < (self.auto.every if state.expected_s is not None else FIRST):
            return state, ""
        state = self._judged(state, seen)
        known = machines(_some(seen.silos), state.laps)
        fresh = replace(state, since_s=seen.at_s, commits=0, samples={})
        if len(known) < 2:
            return fresh, ""
        return self._looked(fresh, _Stage(self, known, seen, self._elasticity(state, len(seen.metas))))

    def _looked(self, state: AutoState, stage: _Stage) -> tuple[AutoState, str]:
        """Compare what the choice in force promises with the best of the others."""
        now = None if state.choice.way in state.starving else stage.promise(state.choice, state)
        best = max(self._promises(state, stage), key=lambda promise: promise.rate, default=None)
        better = None if best is None else stage.promise(best.choice, state)
        stays = now is not None and (better is None or better.rate < (1 + self.auto.gain) * now.rate)
        if stays or better is None or better.choice == state.choice:
            return replace(state, expected_s=None if now is None else now.seconds), ""
        times = "" if now is None else f", {better.rate / now.rate:.2f} times the progress a second"
        reason = (
            f"auto: {self._told(better.choice)} instead of {self._told(state.choice)}{times}: {better.seconds:.3g} s a "
            f"commit{'' if now is None else f' instead of {now.seconds:.3g} s'}, elasticity {stage.elasticity:.2f}"
        )
        return replace(state, choice=better.choice, expected_s=better.seconds), reason

    def _promises(self, state: AutoState, stage: _Stage) -> list[_Promise]:
        """The best number of steps of each way, by a line through two rehearsals."""
        found = []
        for balancer in range(len(self.balancers)):
            for barrier in range(len(self.barriers)):
                if (balancer, barrier) in state.starving:
                    continue
                promise = self._line(state, stage, AutoChoice(state.choice.steps, balancer, barrier))
                if promise is not None:
                    found.append(promise)
        return found

    def _line(self, state: AutoState, stage: _Stage, at: AutoChoice) -> _Promise | None:
        """The best number of steps within `STRIDE`, by lines through the seconds and the steps of two rehearsals."""
        few, many = (stage.rehearsed(replace(at, steps=steps)) for steps in (at.steps, 2 * at.steps))
        if few is None or many is None:
            return None
        best = None
        low = max(self.auto.least_steps, math.ceil(at.steps / STRIDE))
        for steps in range(low, max(min(self.auto.most_steps, at.steps * STRIDE), low) + 1):
            way = steps / at.steps - 1
            seconds = max(few.seconds + way * (many.seconds - few.seconds), few.seconds / STRIDE)
            done = max(few.steps + way * (many.steps - few.steps), 1.0)
            rate = stage.progress(done, few.staleness) / (seconds * state.delays.get(at.way, 1.0))
            if best is None or rate > best.rate:
                best = _Promise(replace(at, steps=steps), seconds, rate)
        return best

    def _judged(self, state: AutoState, seen: CommitSeen) -> AutoState:
        """What the time since the last look says of the way that was in use."""
        way, delays = state.choice.way, {key: value**FADING for key, value in state.delays.items()}
        if state.expected_s is not None:
            seconds = (seen.at_s - state.since_s) / state.commits
            delays[way] = max(seconds / (CHANCE * state.expected_s), 1.0)
        counted = {name: count for name, count in state.samples.items() if name in seen.silos}
        least = self.auto.least_share * sum(counted.values()) / max(len(counted), 1)
        starves = way != (0, 0) and min(counted.values(), default=0) < math.floor(least)
        return replace(state, delays=delays, starving=state.starving | ({way} if starves else set()))

    def _elasticity(self, state: AutoState, updates: int) -> float:
        found = elasticity.of_norms(state.norms)
        if found is None and state.first_loss is not None and state.loss is not None:
            found = elasticity.of_losses(state.first_loss, state.loss)
        found = elasticity.UNKNOWN if found is None else found
        return elasticity.of_directions(found, updates) if self.by_direction else found

    @property
    def fitter(self) -> CurveFitter | None:
        """What learns curves, if one of the balancers wants to know them."""
        return next((fitter for each in self.balancers if (fitter := each.sizing(self.work).fitter)), None)

    def sized(self, choice: AutoChoice) -> Sizing:
        """What turns forecasts into work; no batch falls below the least share."""
        sizing = self.balancers[choice.balancer].sizing(replace(self.work, steps=choice.steps))
        floor = max(sizing.floor, math.ceil(self.auto.least_share * self.work.batch_size))
        return replace(sizing, floor=floor, fitter=self.fitter)

    def built(self, choice: AutoChoice) -> BarrierPolicy[Any]:
        """The barrier itself."""
        barrier = self.barriers[choice.barrier]
        return barrier if choice.pace_s is None else barrier.around(barrier.innermost.paced(choice.pace_s))

    def _told(self, choice: AutoChoice) -> str:
        barrier = self.barriers[choice.barrier]
        inner = "" if barrier.innermost is barrier else f" around {barrier.innermost.kind}"
        return f"{choice.steps} steps, {self.balancers[choice.balancer].kind}, {barrier.kind}{inner}"


def tuner_of(
    auto: Auto,
    balancer: BalancerPolicy,
    barriers: tuple[BarrierPolicy[Any], ...],
    work: LocalWork,
    quorum: int,
    predictor: AnyPredictor,
    weigher: Weigher,
    inertia: float = 0.0,
    by_direction: bool = False,
) -> AutoTuner:
    """The tuner of a strategy with this balancer.

    Other arguments are `AutoTuner`'s. A predictor that learns would have to be trained in each rehearsal: there a
    moving average stands in for it.
    """
    return AutoTuner(
        auto,
        work,
        (balancer, *(each for each in auto.balancers if each != balancer)),
        barriers,
        quorum,
        Ema() if predictor.learns else predictor,
        weigher,
        inertia,
        by_direction,
    )


class _Stage:
    """One look: machines, and what was rehearsed on them."""

    def __init__(
        self, tuner: AutoTuner, known: Mapping[str, RecordedMachine], seen: CommitSeen, elastic: float
    ) -> None:
        self.elasticity = elastic
        self._tuner, self._machines, self._seed = tuner, known, seen.seed
        facts = {name: seen.silos[name].facts for name in known}
        self._facts = {
            name: replace(each, memory_samples=each.fits(seen.found_caps.get(name))) for name, each in facts.items()
        }
        self._played: dict[AutoChoice, Rehearsal | None] = {}

    def progress(self, steps: float, staleness: float) -> float:
        """What a commit brings, in no unit."""
        return elasticity.progress(steps, staleness, self.elasticity, self._tuner.inertia)

    def promise(self, choice: AutoChoice, state: AutoState) -> _Promise | None:
        """By a rehearsal of the choice itself; None if it makes no progress, or leaves a silo too little."""
        played = self.rehearsed(choice)
        if played is None:
            return None
        seconds = played.seconds * state.delays.get(choice.way, 1.0)
        return _Promise(self._paced(choice), played.seconds, self.progress(played.steps, played.staleness) / seconds)

    def rehearsed(self, choice: AutoChoice) -> Rehearsal | None:
        choice = self._paced(choice)
        if choice not in self._played:
            self._played[choice] = self._play(choice)
        return self._played[choice]

    def _play(self, choice: AutoChoice) -> Rehearsal | None:
        tuner = self._tuner
        policies = Policies(
            self._seed,
            tuner.predictor,
            tuner.sized(choice),
            tuner.built(choice),
            tuner.weigher,
            StopRules(),
        )
        # With an order queued at each silo commits may come in pairs.
        commits = 4 if tuner.barriers[choice.barrier].queues else 3
        played = rehearse(policies, self._machines, self._facts, commits=commits, warm=2)
        if played is None or choice.way == (0, 0):
            return played
        return played if min(played.shares.values()) * len(played.shares) >= tuner.auto.least_share else None

    def _paced(self, choice: AutoChoice) -> AutoChoice:
        """With the length of a round in which silos do so many steps in the mean."""
        if choice.pace_s is not None:
            return choice
        barrier, batch = self._tuner.barriers[choice.barrier].innermost, self._tuner.work.batch_size
        if barrier.paced(1.0) == barrier.paced(2.0):
            return choice
        curves = [machine.curve for machine in self._machines.values()]
        speed = sum(1.0 / curve.step_s(batch) for curve in curves) / len(curves)
        return replace(choice, pace_s=median(curve.overhead_s for curve in curves) + choice.steps / speed)


def _counted(state: AutoState, seen: CommitSeen) -> AutoState:
    """One commit more."""
    samples = dict(state.samples) if state.commits else dict.fromkeys(seen.silos, 0)
    for meta in seen.metas:
        if meta.silo in samples:
            samples[meta.silo] += meta.samples
    first = seen.loss if state.first_loss is None else state.first_loss
    return replace(state, commits=state.commits + 1, samples=samples, first_loss=first, loss=seen.loss)


def _some(silos: Mapping[str, Any]) -> dict[str, Any]:
    """At most so many silos, of all speeds."""
    known = sorted((name for name, silo in silos.items() if silo.forecast), key=lambda name: silos[name].forecast.speed)
    every = -(-len(known) // MOST_SILOS) or 1
    taken = set(known[::every])
    return {name: silo for name, silo in silos.items() if name in taken}
