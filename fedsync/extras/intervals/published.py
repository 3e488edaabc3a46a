"""FSP's published searches for the length of time-bounded rounds: halving while halving helps, and a fitted line.

The loss of a round is the silos' mean training loss, and counts for the model at the round's beginning. So the loss of
round 1 belongs to the initial model, and the gain of k rounds is known one round later: ``loss of round 1 - loss of
round k + 1``. All rounds of a gain have the same interval, because a longer local run shows a lower mean loss of the
same model.

Source: Wang et al., "FSP", section 3.3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Ge

from fedsync.policies.barrier.intervals import Attempt, IntervalPolicy, IntervalRound
from fedsync.policies.schema import PartOfOne, Positive, register


@dataclass(frozen=True, slots=True)
class HalvingState:
    """State of `HalvingInterval`; ``rate`` is the loss decrease per second of the last accepted interval."""

    interval_s: float
    rate: float | None = None
    seen: tuple[IntervalRound, ...] = ()
    settled: bool = False


@register("binary")
@dataclass(frozen=True, slots=True)
class HalvingInterval(IntervalPolicy[HalvingState]):
    """Interval that is divided by ``factor`` while the loss then falls faster: FSPB, recursive binary search.

    One round of interval eta is compared with ``factor`` rounds of ``eta / factor``. The smaller interval is accepted,
    then divided in turn, if its loss falls more per elapsed second. Otherwise the last accepted interval stays for the
    rest of the run. With one extra round per gain, the search costs ``2 + (factor + 1) log(eta_0 / eta*)`` rounds.

    The comparison assumes that the loss falls linearly, so it misjudges wherever the decrease slows down;
    `FittedInterval` does not. The paper searches again when the environment changes; here the search runs once.

    Source: FSP, section 3.3, "Recursive Binary Searching", figure 2a.
    """

    interval_s: Positive
    """Duration of the first rounds [s]."""

    factor: Annotated[int, Ge(2)] = 2
    """Divisor of the interval at each trial."""

    floor_s: Positive = 0.1
    """Shortest interval [s]."""

    def __post_init__(self) -> None:
        if self.floor_s > self.interval_s:
            raise ValueError(f"floor_s {self.floor_s:g} exceeds interval_s {self.interval_s:g}; lower the floor")

    def init(self) -> HalvingState:
        return HalvingState(self.interval_s)

    def attempt(self, state: HalvingState) -> Attempt:
        return Attempt(state.interval_s)

    def observe(self, state: HalvingState, seen: IntervalRound) -> HalvingState:
        if state.settled:
            return state
        rounds = (*state.seen, seen)
        gains = 1 if state.rate is None else self.factor
        if len(rounds) <= gains:
            return replace(state, seen=rounds)
        rate = (rounds[0].loss - rounds[-1].loss) / sum(one.seconds for one in rounds[:-1])
        if state.rate is not None and not rate > state.rate:
            return HalvingState(state.interval_s * self.factor, state.rate, settled=True)
        smaller = state.interval_s / self.factor
        if smaller < self.floor_s:
            return HalvingState(state.interval_s, rate, settled=True)
        return HalvingState(smaller, rate)


@dataclass(frozen=True, slots=True)
class QualityFit:
    """Quality function of a stage, g(eta) = slope x eta + offset [loss / s of training]."""

    slope: float
    offset: float

    def at(self, eta: float) -> float:
        return self.slope * eta + self.offset

    def best(self, cost_s: float, low: float, high: float) -> float:
        """Return the eta in [low, high] with the greatest gain, equation 7; ``cost_s`` is phi.

        gain(eta) = (T - phi T / (eta + phi)) g(eta) = T eta (a eta + b) / (eta + phi). Its derivative has the sign of
        ``a eta^2 + 2 a phi eta + b phi``. For a < 0 < b, the maximum is the one positive root, ``sqrt(phi^2 + phi b /
        |a|) - phi``. Otherwise the better bound wins.
        """
        candidates = [low, high]
        if self.slope < 0 < self.offset:
            root = math.sqrt(cost_s**2 + cost_s * self.offset / -self.slope) - cost_s
            candidates.append(min(max(root, low), high))
        return max(candidates, key=lambda eta: (eta * self.at(eta) / (eta + cost_s), eta))


@dataclass(frozen=True, slots=True)
class FittingState:
    """State of `FittedInterval`.

    Args:
        seen: rounds of the current phase.
        single: (eta, gain per second) of the trial with eta, None before it.
        fit: line of the current stage; None in a trial, or if no line could be fitted.
        eta: training time of a round in the stage [s].
        cost_s: phi, mean over ``rounds`` rounds.
    """

    seen: tuple[IntervalRound, ...] = ()
    single: tuple[float, float] | None = None
    fit: QualityFit | None = None
    eta: float = 0.0
    in_stage: bool = False
    cost_s: float = 0.0
    rounds: int = 0


@register("linear")
@dataclass(frozen=True, slots=True)
class FittedInterval(IntervalPolicy[FittingState]):
    """Interval from a line fitted to the loss decrease, stage by stage: FSPV.

    A stage begins at a model X with two trials: rounds with eta, rollback to X, a round with 2 eta on the same data.
    Each trial gives a point (eta, loss decrease per second of training); the two points give a line ``g(eta) = a eta +
    b``. The best interval of the line (equation 7, `QualityFit.best`) is used for the rest of the stage. The stage ends
    when the loss falls more slowly than predicted, or after ``stage_s``.

    The paper's trials have two rounds with eta and one with 2 eta. Here each trial has one more round, because a gain
    is known a round later. The extra round of the first trial is rolled back.

    Source: FSP, section 3.3, "Multi-Stage Self-Corrected Linear Fitting", equation 7, figure 2b and c.
    """

    interval_s: Positive
    """Duration of a round in the first trial, transfer included [s]. The second trial takes about twice as long."""

    stage_s: Positive = 60.0
    """Longest stage, measured in training time [s]."""

    floor_s: Positive | None = None
    """Shortest round [s]. Default: a quarter of ``interval_s``."""

    ceiling_s: Positive | None = None
    """Longest round, trials included [s]. Default: four times ``interval_s``."""

    behind: PartOfOne = 0.5
    """Share of the predicted loss decrease below which a stage ends; checked from the third gain on (noise)."""

    rolls_back = True

    def __post_init__(self) -> None:
        low, high = self._bounds()
        if not low <= self.interval_s <= high:
            raise ValueError(
                f"interval_s {self.interval_s:g} lies outside floor_s {low:g} to ceiling_s {high:g}; move the bounds"
            )

    def _bounds(self) -> tuple[float, float]:
        # A line fitted over a factor of two is trusted over a factor of four in both directions.
        return self.floor_s or self.interval_s / 4, self.ceiling_s or self.interval_s * 4

    def init(self) -> FittingState:
        return FittingState()

    def attempt(self, state: FittingState) -> Attempt:
        if state.in_stage:
            return Attempt(self._clipped(state.eta + state.cost_s))
        if state.single is None:
            return Attempt(self.interval_s, savepoint=not state.seen)
        return Attempt(self._clipped(2 * state.single[0] + state.cost_s), rollback=not state.seen)

    def observe(self, state: FittingState, seen: IntervalRound) -> FittingState:
        cost_s = (state.cost_s * state.rounds + seen.cost_s) / (state.rounds + 1)
        state = replace(state, seen=(*state.seen, seen), cost_s=cost_s, rounds=state.rounds + 1)
        if state.in_stage:
            return self._follow(state)
        if state.single is None:
            return state if len(state.seen) < 3 else replace(state, seen=(), single=_point(state.seen))
        return state if len(state.seen) < 2 else self._begin_stage(state, state.single, _point(state.seen))

    def _begin_stage(
        self, state: FittingState, single: tuple[float, float], double: tuple[float, float]
    ) -> FittingState:
        """Fit the line, or take the better trial if both had the same eta, or neither reduced the loss."""
        fit = None
        eta, rate = max(single, double, key=lambda point: point[1])
        if rate > 0 and abs(double[0] - single[0]) > 1e-3 * single[0]:
            slope = (double[1] - single[1]) / (double[0] - single[0])
            fit = QualityFit(slope, single[1] - slope * single[0])
            low, high = (max(bound - state.cost_s, 1e-3 * bound) for bound in self._bounds())
            eta = fit.best(state.cost_s, low, high)
        return FittingState(fit=fit, eta=eta, in_stage=True, cost_s=state.cost_s, rounds=1)

    def _follow(self, state: FittingState) -> FittingState:
        valid_s = sum(one.valid_s for one in state.seen[:-1])
        over = valid_s >= self.stage_s
        if state.fit is not None and len(state.seen) > 3:
            expected = state.fit.at(state.eta) * valid_s
            over = over or state.seen[0].loss - state.seen[-1].loss < self.behind * expected
        return FittingState() if over else state

    def _clipped(self, interval_s: float) -> float:
        low, high = self._bounds()
        return min(max(interval_s, low), high)


def _point(rounds: tuple[IntervalRound, ...]) -> tuple[float, float]:
    valid_s = sum(one.valid_s for one in rounds[:-1])
    return valid_s / (len(rounds) - 1), (rounds[0].loss - rounds[-1].loss) / valid_s
