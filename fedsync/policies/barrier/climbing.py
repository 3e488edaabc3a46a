"""How long a time-bounded round should be, searched for from the shortest interval upwards.

`HalvingInterval` begins with a long interval and compares it with a shorter one that comes later. Both cost most where
they teach least: a trial of a long interval takes long, and the loss falls most steeply in the first rounds,
so that whatever comes later looks worse (the paper's "false positive").
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import mean, stdev
from typing import Annotated

from annotated_types import Ge, Gt

from fedsync.policies.barrier.intervals import Attempt, IntervalPolicy, IntervalRound
from fedsync.policies.schema import NonNegative, Positive, PositiveInt, register


@dataclass(frozen=True, slots=True)
class Trial:
    """An interval on trial.

    Args:
        interval_s: its length.
        before: rate with the old interval, before it.
        during: its own rate; None until it is over and the old interval is back.
    """

    interval_s: float
    before: float
    during: float | None = None


@dataclass(frozen=True, slots=True)
class ClimbingState:
    """Of `ClimbingInterval`.

    Args:
        interval_s: settled on for the time being.
        seen: rounds of the present phase.
        trial: in work or being judged, or None.
        longer: scores of the trials of the next longer interval, oldest first.
        shorter: likewise of the next shorter one.
        rest: rounds to go before the next trial.
        pause: rest after the next trial.
        up: whether the next trial is of the longer interval, where both are possible.
        cost_s: barrier cost of a round, smoothed.
    """

    interval_s: float
    seen: tuple[IntervalRound, ...] = ()
    trial: Trial | None = None
    longer: tuple[float, ...] = ()
    shorter: tuple[float, ...] = ()
    rest: int = 0
    pause: int = 1
    up: bool = True
    cost_s: float = 0.0


@register("climb")
@dataclass(frozen=True, slots=True)
class ClimbingInterval(IntervalPolicy[ClimbingState]):
    """Begin with the shortest interval, and climb once trials agree that a longer one is better.

    - The search begins at the bottom, where a round, and so an error, costs least.
    - Rates are relative, ``ln(loss of round 1 / loss of round k + 1) / elapsed seconds``. A longer local run shows a
      lower mean loss of the same model; as far as it is lower by a factor, that cancels.
    - A trial is compared with the geometric mean of the rates with the old interval before and after it: a rate that
      falls geometrically from phase to phase cancels too. Nothing is rolled back.
    - The rates of a few rounds are mostly noise, so one trial decides nothing: a neighbour is taken when the mean
      score of at least ``trials`` of its trials exceeds zero by ``confidence`` standard errors. Until then the interval
      stays, which at first is the shortest: of those that noise cannot tell apart.
    - ``rest`` rounds pass between two trials; after each that was no better twice as many, up to eight times: what
      is known already costs less. The other neighbour is next then.

    The score of a trial is ``(r - u) / (abs(r) + abs(u))`` for its rate r and the usual rate u: from -1 to 1, so that
    no single trial outweighs all others.

    Source: the question is FSP's (section 3.3); the answer departs from the paper's two for the reasons above.
    """

    floor_s: Positive = 0.1
    """No round is shorter; nor is one shorter than twice what an order costs besides training [s]."""

    ceiling_s: Positive = 60.0
    """No round is longer [s]."""

    factor: Annotated[float, Gt(1)] = 1.5
    """By how much a trial is longer or shorter."""

    gains: PositiveInt = 1
    """Gains of the loss in a trial, which takes one round more."""

    trials: Annotated[int, Ge(2)] = 3
    """Trials of an interval, at least, before it can be taken; the last eight count."""

    confidence: NonNegative = 2.0
    """Standard errors by which trials have to be better, in the mean, than what came before and after."""

    rest: PositiveInt = 6
    """Rounds between two trials; twice as many after each that was no better."""

    def __post_init__(self) -> None:
        if self.floor_s > self.ceiling_s:
            raise ValueError(f"floor_s {self.floor_s:g} exceeds ceiling_s {self.ceiling_s:g}; lower the floor")

    def init(self) -> ClimbingState:
        return ClimbingState(self.floor_s, rest=self.rest, pause=self.rest)

    def attempt(self, state: ClimbingState) -> Attempt:
        """The interval on trial, or the one settled on."""
        on_trial = state.trial is not None and state.trial.during is None
        interval_s = state.trial.interval_s if state.trial is not None and on_trial else state.interval_s
        return Attempt(self._clipped(interval_s, state.cost_s))

    def observe(self, state: ClimbingState, seen: IntervalRound) -> ClimbingState:
        """One more round; the last one of a phase begins a trial, ends it or judges it."""
        cost_s = (state.cost_s + seen.cost_s) / 2 if state.cost_s else seen.cost_s
        # Of a long rest only its end is compared with what follows.
        rounds = (*state.seen, seen)[-self.gains - 1 :]
        state = replace(state, seen=rounds, cost_s=cost_s, rest=max(state.rest - 1, 0))
        if len(rounds) <= self.gains or (state.trial is None and state.rest > 0):
            return state
        rate = relative_rate(rounds)
        if state.trial is None:
            return self._begin(state, rate)
        if state.trial.during is None:
            return replace(state, trial=replace(state.trial, during=rate), seen=())
        return self._judge(state, state.trial, score(state.trial.before, state.trial.during, rate))

    def _begin(self, state: ClimbingState, rate: float) -> ClimbingState:
        """Try a neighbour of the interval, where the bounds leave one."""
        now_s = self._clipped(state.interval_s, state.cost_s)
        longer, shorter = (self._clipped(now_s * by, state.cost_s) for by in (self.factor, 1 / self.factor))
        choice = longer if (state.up and longer > now_s) or shorter >= now_s else shorter
        if choice == now_s:
            return state
        return replace(state, interval_s=now_s, trial=Trial(choice, rate), seen=())

    def _judge(self, state: ClimbingState, trial: Trial, score: float) -> ClimbingState:
        """Move, if all trials of this neighbour together say so; else rest."""
        is_longer = trial.interval_s > state.interval_s
        scores = (*(state.longer if is_longer else state.shorter), score)[-8:]
        if len(scores) >= self.trials and mean(scores) > self.confidence * stdev(scores) / math.sqrt(len(scores)):
            return ClimbingState(trial.interval_s, pause=self.rest, up=is_longer, cost_s=state.cost_s)
        return replace(
            state,
            trial=None,
            longer=scores if is_longer else state.longer,
            shorter=state.shorter if is_longer else scores,
            rest=state.pause,
            pause=state.pause if score > 0 else min(2 * state.pause, 8 * self.rest),
            up=is_longer == (score > 0),
        )

    def _clipped(self, interval_s: float, cost_s: float) -> float:
        return min(max(interval_s, self.floor_s, 2 * cost_s), self.ceiling_s)


def score(before: float, during: float, after: float) -> float:
    """How much better a trial was than what came before and after it, -1 to 1; 0 if nothing moved."""
    # Where the loss rose, rates have no geometric mean.
    usual = math.sqrt(before * after) if min(before, after) > 0 else (before + after) / 2
    size = abs(during) + abs(usual)
    return (during - usual) / size if size > 0 else 0.0


def relative_rate(rounds: tuple[IntervalRound, ...]) -> float:
    """Decrease of the loss's logarithm per elapsed second, over rounds with one interval.

    A loss that is not positive is no cross entropy or squared error; it counts as the least positive one.
    """
    first, last = (max(one.loss, 1e-12) for one in (rounds[0], rounds[-1]))
    return math.log(first / last) / sum(one.seconds for one in rounds[:-1])
