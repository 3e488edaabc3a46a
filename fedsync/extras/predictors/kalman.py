"""Kalman predictor of a silo's speed: a drifting level with jumps, observed through noise and spikes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedsync.core.protocols import MachineLoad, SpeedSample
from fedsync.policies.predict.predictor_base import PredictorPolicy
from fedsync.policies.schema import Positive, register

FIRST_NOISE = 0.1**2
"""Initial variance of the noise: 10 % of the speed."""

LEAST_NOISE = 1e-6
"""Least variance of the noise, above rounding: 0.1 % of the speed."""


@dataclass(frozen=True, slots=True)
class KalmanState:
    """State in logarithms of the speed, so that errors are relative.

    Args:
        level: mean of the level.
        variance: variance of the level.
        noise: variance of a measurement around the level.
        suspect: last measurement if it was beyond the gate, or None.
    """

    level: float
    variance: float
    noise: float
    suspect: float | None = None


@register("kalman")
@dataclass(frozen=True, slots=True)
class Kalman(PredictorPolicy[KalmanState | None]):
    """Drifting level with change points: two orders in a row beyond ``gate`` standard deviations make a change point.

    Local level model, ``y_k = l_k + noise``, ``l_k = l_{k-1} + drift``, with change points.

    A measurement y with innovation ``z = y - l`` of variance ``S = P + Q + R`` is accepted if ``z^2 <= gate^2 S``. Then
    ``l += K z``, ``K = (P + Q) / S``, ``P = (1 - K)(P + Q)``. A measurement beyond the gate does not move the level
    yet. If the next measurement is inside the gate, the first was a spike. If the next is outside on the same side, it
    is a *change point*: the level restarts as the mean of the two, with variance R / 2.

    The noise variance is learned: ``R += rate (z^2 R / S - R)``, with z^2 limited to the gate. So a spike moves it
    little, and lasting noise opens the gate. The drift variance is in proportion, ``Q = drift R``.

    Source: the textbook local level model with an innovation gate; the papers do not use it.
    """

    drift: Positive = 0.2
    """Variance of the level's drift per order, relative to the learned variance of the noise."""

    gate: Positive = 3.0
    """Standard deviations beyond which a speed is not accepted at once."""

    rate = 0.05  # weight of the newest innovation in the variance of the noise

    def init(self) -> KalmanState | None:
        return None

    def observe(self, state: KalmanState | None, sample: SpeedSample) -> KalmanState | None:
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

    def forecast(self, state: KalmanState | None, drivers: MachineLoad | None = None) -> float | None:
        return None if state is None else math.exp(state.level)
