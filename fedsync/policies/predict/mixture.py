"""Predictor that averages all other predictors' forecasts of a silo's speed, weighted by their recent errors."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from statistics import median
from typing import Annotated, Any, TypeVar, cast

from fedsync.core.protocols import MachineLoad, SpeedSample
from fedsync.policies.predict.predictor_base import PredictorPolicy
from fedsync.policies.schema import Chosen, Positive, Share, kinds, register

_LEAST_PROMISE, _MOST_PROMISE = 1e-6, 25.0


@dataclass(frozen=True, slots=True)
class MixtureState:
    """State of one silo; all tuples in the order of the experts. ``errors`` are recent mean squared errors, empty
    before the second order. ``promised`` says whether each expert's `PredictorPolicy.promise` has been counted.
    """

    states: tuple[Any, ...]
    errors: tuple[float, ...]
    promised: tuple[bool, ...]
    orders: int = 0
    turn: int = 0


def _one_of_each() -> tuple[PredictorPolicy[Any], ...]:
    known = kinds("predictor")
    names = ("memoryless", "ema", "arima", "rnn", "lstm", "narx", "kalman")
    return tuple(cast(PredictorPolicy[Any], known[name]()) for name in names)


@register("mixture")
@dataclass(frozen=True, slots=True)
class Mixture(PredictorPolicy[MixtureState]):
    """Mean of other predictors' forecasts, weighted by their recent errors.

    The weight of expert i is ``e_i^-power``, where e_i is its recent mean squared error. These are exponential weights
    on the logarithm of the error, so they need no unit and no learning rate. At ``power`` 8, an expert with 1.2 times
    the best root mean squared error has a twentieth of the best weight; at 1.5 times, 1/650.

    Old errors fade at the rate ``forget``, so that the weights follow when another expert becomes the best. The mean
    error is a plain mean before ``1 / forget`` orders. After these, one squared error counts at most 25 times the
    median expert's mean, so that an unpredictable stall does not decide.

    Until an expert uses its first trained model, its error is that of its moving average. Then this error is multiplied
    by the model's relative error on held-out samples; otherwise a good model would wait for its weight. The factor is
    at most 25, so that a bad model can regain its weight.

    Source: none of the papers. Exponentially weighted experts with discounting: Cesa-Bianchi and Lugosi, "Prediction,
    Learning, and Games", section 2.11.
    """

    experts: Annotated[tuple[PredictorPolicy[Any], ...], Chosen("predictor", several=True)] = field(
        default_factory=_one_of_each
    )
    """Predictors in the mixture. Default: one of each other kind."""

    power: Positive = 8.0
    """Exponent of the inverse mean squared error in an expert's weight."""

    forget: Share = 0.01
    """Weight of the newest squared error in the recent mean squared error."""

    def __post_init__(self) -> None:
        if any(isinstance(expert, Mixture) for expert in self.experts):
            raise ValueError("a mixture cannot contain a mixture; write the inner mixture's experts instead")

    @property
    def learns(self) -> bool:
        return any(expert.learns for expert in self.experts)

    def init(self) -> MixtureState:
        return MixtureState(tuple(expert.init() for expert in self.experts), (), (False,) * len(self.experts))

    def observe(self, state: MixtureState, sample: SpeedSample) -> MixtureState:
        told = self._told(state, sample.known)
        errors, orders = state.errors, state.orders
        if told:
            squares = [(speed - sample.speed) ** 2 for speed in told]
            # A perfect expert still gets the rounding error; otherwise the first perfect expert would take all weight.
            errors, orders = self._remember(errors, squares, 1e-12 * sample.speed**2, orders), orders + 1
        states = tuple(expert.observe(inner, sample) for expert, inner in zip(self.experts, state.states, strict=True))
        return replace(state, states=states, errors=errors, orders=orders)

    def forecast(self, state: MixtureState, drivers: MachineLoad | None = None) -> float | None:
        told = self._told(state, drivers)
        if not told:
            return None
        weights = self._weights(state.errors)
        return sum(weight * speed for weight, speed in zip(weights, told, strict=True))

    def unlearned(self, state: MixtureState) -> bool:
        return any(expert.unlearned(inner) for expert, inner in zip(self.experts, state.states, strict=True))

    def learn(self, state: MixtureState, epochs: int) -> MixtureState:
        count = len(self.experts)
        for index in ((state.turn + ahead) % count for ahead in range(count)):
            expert, inner = self.experts[index], state.states[index]
            if expert.unlearned(inner):
                after = expert.learn(inner, epochs)
                turn = index if expert.unlearned(after) else (index + 1) % count
                return self._count_promise(replace(state, states=_put(state.states, index, after), turn=turn), index)
        return state

    def reuse(self, state: MixtureState, donor: MixtureState) -> MixtureState:
        pairs = zip(self.experts, state.states, donor.states, strict=True)
        return replace(state, states=tuple(expert.reuse(inner, other) for expert, inner, other in pairs))

    def weights(self, state: MixtureState) -> tuple[float, ...]:
        return tuple(self._weights(state.errors))

    def _told(self, state: MixtureState, drivers: MachineLoad | None) -> list[float]:
        told = [expert.forecast(inner, drivers) for expert, inner in zip(self.experts, state.states, strict=True)]
        known = [speed for speed in told if speed is not None]
        return known if len(known) == len(told) else []

    def _weights(self, errors: tuple[float, ...]) -> list[float]:
        if not errors:
            return [1.0 / len(self.experts)] * len(self.experts)
        best = min(errors)
        weights = [(best / error) ** self.power for error in errors]
        total = sum(weights)
        return [weight / total for weight in weights]

    def _remember(
        self, errors: tuple[float, ...], squares: list[float], least: float, orders: int
    ) -> tuple[float, ...]:
        if not errors:
            return tuple(max(square, least) for square in squares)
        rate, most = max(self.forget, 1.0 / (orders + 1)), 25.0 * median(errors)
        if orders < 1.0 / self.forget:
            most = float("inf")  # the first errors say little about the possible size of an error
        return tuple(
            max(error + rate * (min(square, most) - error), least)
            for error, square in zip(errors, squares, strict=True)
        )

    def _count_promise(self, state: MixtureState, index: int) -> MixtureState:
        promise = self.experts[index].promise(state.states[index])
        if promise is None or state.promised[index] or not state.errors:
            return state
        # Against an exact average the ratio is unbounded. It would ban the expert for ever, or overflow to an infinite
        # error, which becomes NaN with the next order.
        scale = min(max(promise, _LEAST_PROMISE), _MOST_PROMISE)
        errors = _put(state.errors, index, scale * state.errors[index])
        return replace(state, errors=errors, promised=_put(state.promised, index, True))


T = TypeVar("T")


def _put(values: tuple[T, ...], index: int, value: T) -> tuple[T, ...]:
    return (*values[:index], value, *values[index + 1 :])
