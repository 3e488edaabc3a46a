"""How long a time-bounded round should be: fixed, halved while that pays, or from a fitted quality function.

A short interval brings fresh parameters often (quality), a long one pays for fewer barriers (quantity). All
three answer one question, how long the next round is, and learn from one observation, how the last one went.

A round's loss is the silos' mean training loss while they trained from the model that the round began
with. So the first loss is that of the model before the first round, and the gain of k rounds is known one
round later: ``loss of round 1 - loss of round k + 1``. All rounds of one gain have one interval, since a
longer local run shows a lower mean loss of the same model.

Source: Wang et al., "FSP", section 3.3.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Annotated, Generic, TypeVar

from annotated_types import Ge

from fedsync.policies.schema import PartOfOne, Policy, Positive, register

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Attempt:
    """How to run the next round.

    Args:
        interval_s: its length, training and barrier cost together.
        remember: keep the model it begins with, for a rollback.
        rollback: begin with the model last remembered.
    """

    interval_s: float
    savepoint: bool = False
    rollback: bool = False


@dataclass(frozen=True, slots=True)
class IntervalRound:
    """How a round went.

    Args:
        seconds: from its orders to its commit.
        cost_s: of these, the mean that silos did not train (phi).
        loss: mean training loss a sample of the updates that began with it.
    """

    seconds: float
    cost_s: float
    loss: float

    @property
    def valid_s(self) -> float:
        """Training time: the interval without its barrier (eta)."""
        return max(self.seconds - self.cost_s, 1e-9)


class IntervalPolicy(Policy, Generic[S]):
    """Chooses the length of each round."""

    __slots__ = ()
    section = "interval"

    @property
    def needs_losses(self) -> bool:
        """Whether the loss of each round counts, which the server has too late where losses are sealed."""
        return True

    @property
    def rolls_back(self) -> bool:
        """Whether an `Attempt` may be rolled back."""
        return False

    @abstractmethod
    def init(self) -> S: ...

    @abstractmethod
    def attempt(self, state: S) -> Attempt:
        """How to run the next round. Asked again if that round came to nothing."""

    @abstractmethod
    def observe(self, state: S, seen: IntervalRound) -> S:
        """State after a committed round."""


@register("fixed")
@dataclass(frozen=True, slots=True)
class FixedInterval(IntervalPolicy[None]):
    """Every round takes ``interval_s`` seconds."""

    interval_s: Positive
    """Seconds of a round, transfer included [s]."""

    needs_losses = False

    def init(self) -> None: ...

    def attempt(self, state: None) -> Attempt:
        return Attempt(self.interval_s)

    def observe(self, state: None, seen: IntervalRound) -> None: ...


@dataclass(frozen=True, slots=True)
class HalvingState:
    """Of `HalvingInterval`.

    Args:
        interval_s: being tried, or settled on.
        rate: loss decrease per second of the last interval that was accepted, None before the first.
        seen: rounds with ``interval_s`` so far.
        settled: whether the search is over.
    """

    interval_s: float
    rate: float | None = None
    seen: tuple[IntervalRound, ...] = ()
    settled: bool = False


@register("binary")
@dataclass(frozen=True, slots=True)
class HalvingInterval(IntervalPolicy[HalvingState]):
    """Divide the interval by ``factor`` as long as the loss then falls faster: recursive binary search, FSPB.

    One round at eta is compared with ``factor`` rounds at ``eta / factor``: the smaller takes effect if
    its decrease of loss per second of elapsed time is the greater, and is divided in turn; otherwise the
    last one stays for good. With the round that each gain needs on top, the search costs
    ``2 + (factor + 1) log(eta_0 / eta*)`` rounds.

    The comparison takes for granted that the loss falls linearly, so it misjudges wherever that slows
    down; `FittedInterval` does not. The paper searches anew when the environment changes, without saying
    how to tell; here a search is for the run.

    Source: FSP, section 3.3, "Recursive Binary Searching", figure 2a.
    """

    interval_s: Positive
    """Seconds of a round to begin with [s]."""

    factor: Annotated[int, Ge(2)] = 2
    """What the interval is divided by."""

    floor_s: Positive = 0.1
    """The interval does not fall below this [s]."""

    def __post_init__(self) -> None:
        if self.floor_s > self.interval_s:
            raise ValueError(f"floor_s {self.floor_s:g} exceeds interval_s {self.interval_s:g}; lower the floor")

    def init(self) -> HalvingState:
        return HalvingState(self.interval_s)

    def attempt(self, state: HalvingState) -> Attempt:
        """The interval on trial, or the final one."""
        return Attempt(state.interval_s)

    def observe(self, state: HalvingState, seen: IntervalRound) -> HalvingState:
        """Compare, once there are rounds enough."""
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
    """A stage's quality function g(eta) = slope x eta + offset [loss / s of training]."""

    slope: float
    offset: float

    def at(self, eta: float) -> float:
        return self.slope * eta + self.offset

    def best(self, cost_s: float, low: float, high: float) -> float:
        """The eta in [low, high] with the greatest gain, equation 7.

        gain(eta) = (T - phi T / (eta + phi)) g(eta) = T eta (a eta + b) / (eta + phi), so T is but a
        factor. The derivative's sign is that of ``a eta^2 + 2 a phi eta + b phi``. For a < 0 < b it has
        one positive root, ``sqrt(phi^2 + phi b / |a|) - phi``, and there the gain is greatest. Otherwise
        the gain has no inner maximum, and the better end wins.

        Args:
            cost_s: phi, barrier cost of a round.
            low: least eta.
            high: greatest eta.
        """
        candidates = [low, high]
        if self.slope < 0 < self.offset:
            root = math.sqrt(cost_s**2 + cost_s * self.offset / -self.slope) - cost_s
            candidates.append(min(max(root, low), high))
        return max(candidates, key=lambda eta: (eta * self.at(eta) / (eta + cost_s), eta))


@dataclass(frozen=True, slots=True)
class FittingState:
    """Of `FittedInterval`.

    Args:
        seen: rounds of the present phase.
        single: eta and gain per second of the trial with eta, None before that.
        fit: of the present stage, None in a trial or if no line could be fitted.
        eta: training time of a round in the stage.
        in_stage: whether the trials are over.
        cost_s: phi, mean over the stage's rounds so far.
        rounds: how many rounds went into ``cost_s``.
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
    """Fit how the decrease of loss depends on the interval, stage by stage, and take the best: FSPV.

    A stage begins at some model X with two trials: rounds with eta, back to X, a round with
    2 eta on the same data. Each gives a point (eta, loss decrease per second of training), both together
    a line ``g(eta) = a eta + b``, whose best interval (equation 7, `QualityFit.best`) is used for the rest of the
    stage. The stage ends when the loss falls behind the prediction, or after ``stage_s``.

    The paper's trials are two rounds with eta and one with 2 eta. Here each has one more, since a gain is
    known a round later; the first one's is rolled back with the rest, the second's is kept.

    Source: FSP, section 3.3, "Multi-Stage Self-Corrected Linear Fitting", equation 7, figure 2b and c.
    """

    interval_s: Positive
    """Seconds of a round in the first trial, transfer included [s]. The second trial has about twice that."""

    stage_s: Positive = 60.0
    """Longest stage, in seconds of training [s]."""

    floor_s: Positive | None = None
    """No round is shorter; left out, a quarter of ``interval_s`` [s]."""

    ceiling_s: Positive | None = None
    """No round is longer, trials included; left out, four times ``interval_s`` [s]."""

    behind: PartOfOne = 0.5
    """Share of the predicted decrease of the loss below which a stage ends. Looked at from the third gain on: one or
    two rounds are noise."""

    rolls_back = True

    def __post_init__(self) -> None:
        low, high = self._bounds()
        if not low <= self.interval_s <= high:
            raise ValueError(
                f"interval_s {self.interval_s:g} lies outside floor_s {low:g} to ceiling_s {high:g}; move the bounds"
            )

    def _bounds(self) -> tuple[float, float]:
        """A line fitted over a factor of two is trusted over a factor of four either way."""
        return self.floor_s or self.interval_s / 4, self.ceiling_s or self.interval_s * 4

    def init(self) -> FittingState:
        return FittingState()

    def attempt(self, state: FittingState) -> Attempt:
        """Trial with eta, trial with 2 eta, or the stage's best."""
        if state.in_stage:
            return Attempt(self._clipped(state.eta + state.cost_s))
        if state.single is None:
            return Attempt(self.interval_s, savepoint=not state.seen)
        return Attempt(self._clipped(2 * state.single[0] + state.cost_s), rollback=not state.seen)

    def observe(self, state: FittingState, seen: IntervalRound) -> FittingState:
        """One more round of the present phase."""
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
        """Fit the line, or take the better trial where a line says nothing.

        That is where both trials had the same eta (the silos ended early, their data done), or where
        neither made the loss fall.
        """
        fit = None
        eta, rate = max(single, double, key=lambda point: point[1])
        if rate > 0 and abs(double[0] - single[0]) > 1e-3 * single[0]:
            slope = (double[1] - single[1]) / (double[0] - single[0])
            fit = QualityFit(slope, single[1] - slope * single[0])
            low, high = (max(bound - state.cost_s, 1e-3 * bound) for bound in self._bounds())
            eta = fit.best(state.cost_s, low, high)
        return FittingState(fit=fit, eta=eta, in_stage=True, cost_s=state.cost_s, rounds=1)

    def _follow(self, state: FittingState) -> FittingState:
        """End the stage when it is over: trials come next."""
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
    """(eta, loss decrease per second of training) of rounds with one interval."""
    valid_s = sum(one.valid_s for one in rounds[:-1])
    return valid_s / (len(rounds) - 1), (rounds[0].loss - rounds[-1].loss) / valid_s
