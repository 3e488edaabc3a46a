"""A level that drifts and sometimes jumps, seen through noise and spikes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedsync.core.protocols import Drivers, SpeedSample
from fedsync.policies.predict.predictor_base import PredictorPolicy
from fedsync.policies.schema import Positive, register

FIRST_NOISE = 0.1**2
"""Variance of the noise before anything is known of it: 10 % of the speed."""

LEAST_NOISE = 1e-6
"""Below this the noise is not told from rounding: 0.1 % of the speed."""


@dataclass(frozen=True, slots=True)
class KalmanState:
    """Everything is in logarithms of the speed, so that errors are relative.

    Args:
        level: mean of the level.
        variance: of the level.
        noise: variance of a measurement about the level.
        suspect: the last measurement if it was too far out to be believed, or None.
    """

    level: float
    variance: float
    noise: float
    suspect: float | None = None


@register("kalman")
@dataclass(frozen=True, slots=True)
class Kalman(PredictorPolicy[KalmanState | None]):
    """A drifting level with change points: two orders in a row beyond ``gate`` standard deviations are one.

    Local level model, ``y_k = l_k + noise``, ``l_k = l_{k-1} + drift``, with change points.

    A measurement y with innovation ``z = y - l`` of variance ``S = P + Q + R`` is believed if ``z^2 <= gate^2 S``;
    then ``l += K z``, ``K = (P + Q) / S``, ``P = (1 - K)(P + Q)``. One beyond the gate changes nothing yet: it is a
    spike if the next one is back, and a *change point* if the next one is out too, on the same side. Then the level
    begins anew as the mean of the two, with variance R / 2.

    The variance of the noise is learned: ``R += rate (z^2 R / S - R)``, z^2 at most at the gate, so that a spike
    moves it a little and lasting noise opens the gate. The variance of the drift is in proportion, ``Q = drift R``.

    Source: the local level model with an innovation gate, as any textbook on Kalman filters has it; the papers do
    without.
    """

    drift: Positive = 0.2
    """Variance of the level's drift in an order, against that of the noise, which is learned."""

    gate: Positive = 3.0
    """Standard deviations beyond which a speed is not believed at once."""

    rate = 0.05  # weight of the newest innovation in the variance of the noise

    def init(self) -> KalmanState | None:
        return None

    def observe(self, state: KalmanState | None, sample: SpeedSample) -> KalmanState | None:
        """State after one more speed."""
        seen = math.log(sample.speed)
        if state is None:
            return KalmanState(seen, FIRST_NOISE, FIRST_NOISE)
        before = state.variance + self.drift * state.noise
        spread = before + state.noise
        error = seen - state.level
        believed = error * error <= self.gate**2 * spread
        square = min(error * error, self.gate**2 * spread)
        noise = max(state.noise + self.rate * (square / spread - 1.0) * state.noise, LEAST_NOISE)
        if believed:
            weight = before / spread
            return KalmanState(state.level + weight * error, (1 - weight) * before, noise)
        if state.suspect is None or (state.suspect - state.level) * error < 0:
            return KalmanState(state.level, before, noise, suspect=seen)
        return KalmanState((state.suspect + seen) / 2, noise / 2, noise)

    def forecast(self, state: KalmanState | None, drivers: Drivers | None = None) -> float | None:
        """The level [samples/s], or None before the first observation."""
        return None if state is None else math.exp(state.level)
