"""Search for the length of time-bounded rounds, from the shortest interval upwards.

`HalvingInterval` (module `published`) begins with a long interval, whose trials take long. The loss falls most steeply
in the first rounds, so any later, shorter interval looks worse (the paper's "false positive").
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
    """Trial of an interval: rates before it and ``during`` it; None until the old interval is back."""

    interval_s: float
    before: float
    during: float | None = None


@dataclass(frozen=True, slots=True)
class ClimbingState:
    """State of `ClimbingInterval`.

    Args:
        seen: rounds of the current phase.
        longer, shorter: scores of the trials of the next longer and shorter interval, oldest first.
        rest: rounds until the next trial; ``pause`` is the rest after that trial.
        up: whether the next trial takes the longer interval, if both are possible.
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
    """Interval search that begins with the shortest interval and climbs once trials agree on a longer one.

    - The search begins at the bottom, where a round, and so an error, costs least.
    - Rates are relative, ``ln(loss of round 1 / loss of round k + 1) / elapsed seconds``. A longer local run shows a
      lower mean loss of the same model; a constant factor between the losses cancels.
    - A trial is compared with the geometric mean of the rates before and after it, both with the old interval. So a
      geometric decline of the rate from phase to phase cancels too. Nothing is rolled back.
    - Rates of a few rounds are mostly noise. A neighbour is accepted when the mean score of at least ``trials`` trials
      exceeds zero by ``confidence`` standard errors. Until then the interval stays, so the search keeps the shortest of
      the intervals that noise cannot tell apart.
    - Two trials are ``rest`` rounds apart. After each trial that was no better, the rest doubles, up to eight times
      ``rest``, and the other neighbour is next.

    The score of a trial with rate r is ``(r - u) / (abs(r) + abs(u))`` for the usual rate u. It lies between -1 and 1,
    so that no single trial outweighs all others.

    Source: the question is FSP's (section 3.3); the answer departs from the paper's two for the reasons above.
    """

    floor_s: Positive = 0.1
    """Shortest round; a round is also at least twice as long as the overhead of an order [s]."""

    ceiling_s: Positive = 60.0
    """Longest round [s]."""

    factor: Annotated[float, Gt(1)] = 1.5
    """Factor by which a trial interval is longer or shorter than the current interval."""

    gains: PositiveInt = 1
    """Number of loss decreases measured in a trial; the trial takes one round more."""

    trials: Annotated[int, Ge(2)] = 3
    """Fewest trials of an interval before the interval can be accepted; the last eight trials count."""

    confidence: NonNegative = 2.0
    """Standard errors by which the mean score of the trials must exceed zero."""

    rest: PositiveInt = 6
    """Rounds between two trials; doubled after each trial that was no better."""

    def __post_init__(self) -> None:
        if self.floor_s > self.ceiling_s:
            raise ValueError(f"floor_s {self.floor_s:g} exceeds ceiling_s {self.ceiling_s:g}; lower the floor")

    def init(self) -> ClimbingState:
        return ClimbingState(self.floor_s, rest=self.rest, pause=self.rest)

    def attempt(self, state: ClimbingState) -> Attempt:
        on_trial = state.trial is not None and state.trial.during is None
        interval_s = state.trial.interval_s if state.trial is not None and on_trial else state.interval_s
        return Attempt(self._clipped(interval_s, state.cost_s))

    def observe(self, state: ClimbingState, seen: IntervalRound) -> ClimbingState:
        cost_s = (state.cost_s + seen.cost_s) / 2 if state.cost_s else seen.cost_s
        # After a long rest, only the last rounds are compared with the next phase.
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
        now_s = self._clipped(state.interval_s, state.cost_s)
        longer, shorter = (self._clipped(now_s * by, state.cost_s) for by in (self.factor, 1 / self.factor))
        choice = longer if (state.up and longer > now_s) or shorter >= now_s else shorter
        if choice == now_s:
            return state
        return replace(state, interval_s=now_s, trial=Trial(choice, rate), seen=())

    def _judge(self, state: ClimbingState, trial: Trial, score: float) -> ClimbingState:
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
    # Rates have no geometric mean if the loss rose.
    usual = math.sqrt(before * after) if min(before, after) > 0 else (before + after) / 2
    size = abs(during) + abs(usual)
    return (during - usual) / size if size > 0 else 0.0


def relative_rate(rounds: tuple[IntervalRound, ...]) -> float:
    """Decrease of the loss's logarithm per elapsed second; a loss below 1e-12 counts as 1e-12."""
    first, last = (max(one.loss, 1e-12) for one in (rounds[0], rounds[-1]))
    return math.log(first / last) / sum(one.seconds for one in rounds[:-1])
