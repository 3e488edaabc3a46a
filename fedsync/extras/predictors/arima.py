"""Predictor of a silo's speed by an autoregressive integrated moving average (ARIMA), fitted by statsmodels."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from annotated_types import Ge, Le
from numpy.typing import NDArray

from fedsync.core.protocols import MachineLoad, SpeedSample
from fedsync.extras.predictors.small_network import one_thread
from fedsync.policies.predict.predictor_base import Memory, PredictorPolicy
from fedsync.policies.schema import PositiveInt, register

Floats = NDArray[np.float64]
Order = Annotated[int, Ge(0), Le(5)]

_ALPHA = 0.2
_FACTOR = 2.0
_LATELY = 50


@dataclass(frozen=True, slots=True, eq=False)
class Filter:
    """Steady filter of a fitted model: ``a <- T (a + K (y - Z a))``; the forecast is ``Z a``.

    Args:
        transition: T, float64 [k, k].
        gain: T K, float64 [k].
        design: Z, float64 [k].
        unit: divisor of speeds [samples/s].
    """

    transition: Floats
    gain: Floats
    design: Floats
    unit: float

    def step(self, state: Floats, speed: float) -> Floats:
        after: Floats = self.transition @ state + self.gain * (speed / self.unit - float(self.design @ state))
        return after


@dataclass(frozen=True, slots=True, eq=False)
class ArimaState:
    """State of one silo; the next fit is due when ``seen``, the number of observed orders, reaches ``due``."""

    average: float | None = None
    speeds: tuple[float, ...] = ()
    seen: int = 0
    filter: Filter | None = None
    predicted: Floats | None = None
    due: int = 0


@register("arima")
@dataclass(frozen=True, slots=True)
class Arima(PredictorPolicy[ArimaState]):
    """ARIMA model of order (p, d, q); a moving average until the first fit.

    A fit, by maximum likelihood in statsmodels, is training: it runs in `learn`, counts as one epoch and takes about 50
    to 150 ms. Between fits, the fitted filter processes each speed in microseconds: its gain has converged by the end
    of the fitted speeds. A forecast lies within a factor of 2 of the least and greatest of the last 50 speeds.

    Source: LB-BSP, sections 3.2.2 and 5.4.1 (p, d, q = 2, 2, 1).
    """

    p: Order = 2
    """Order of the autoregressive part."""

    d: Annotated[int, Ge(0), Le(2)] = 2
    """Number of times that the series is differenced."""

    q: Order = 1
    """Order of the moving-average part."""

    samples: PositiveInt = 60
    """Number of orders of a silo before the first fit."""

    memory: Memory = 300
    """Number of newest orders used for a fit."""

    renew: PositiveInt = 100
    """Number of orders between two fits."""

    learns = True

    def init(self) -> ArimaState:
        return ArimaState(due=max(self.samples, 3 * (self.p + self.d + self.q + 1)))

    def observe(self, state: ArimaState, sample: SpeedSample) -> ArimaState:
        speed, average, fitted = sample.speed, state.average, state.filter
        return replace(
            state,
            average=speed if average is None else _ALPHA * speed + (1 - _ALPHA) * average,
            speeds=(*state.speeds, speed)[-self.memory :],
            seen=state.seen + 1,
            predicted=None if fitted is None or state.predicted is None else fitted.step(state.predicted, speed),
        )

    def forecast(self, state: ArimaState, drivers: MachineLoad | None = None) -> float | None:
        if state.filter is None or state.predicted is None:
            return state.average
        speed = float(state.filter.design @ state.predicted) * state.filter.unit
        if not math.isfinite(speed):
            return state.average
        lately = state.speeds[-_LATELY:]
        return min(max(speed, min(lately) / _FACTOR), max(lately) * _FACTOR)

    def unlearned(self, state: ArimaState) -> bool:
        return state.seen >= state.due

    def learn(self, state: ArimaState, epochs: int) -> ArimaState:
        """Fit if a fit is due; a failed fit leaves the model, or the average, unchanged."""
        if epochs < 1 or not self.unlearned(state):
            return state
        state = replace(state, due=state.seen + self.renew)
        with one_thread():
            fitted = _fit(np.array(state.speeds), (self.p, self.d, self.q))
        return state if fitted is None else replace(state, filter=fitted[0], predicted=fitted[1])


def _fit(speeds: Floats, order: tuple[int, int, int]) -> tuple[Filter, Floats] | None:
    """Return filter and predicted state, or None if the speeds do not allow a fit."""
    from numpy.linalg import LinAlgError
    from statsmodels.tsa.arima.model import ARIMA

    unit = float(speeds.mean())
    if speeds.std() <= 1e-6 * unit:
        return None  # the speeds are constant, so the average is exact
    try:
        with warnings.catch_warnings():
            # Warnings about starting values and convergence are ignored; the result is checked below.
            warnings.simplefilter("ignore")
            model = ARIMA(speeds / unit, order=order, trend="n")
            result = model.fit(cov_type="none", method_kwargs={"maxiter": 30, "disp": 0})
    except (LinAlgError, ValueError, FloatingPointError):
        return None
    filtered = result.filter_results
    made = Filter(
        transition=np.array(filtered.transition[:, :, -1]),
        gain=np.array(filtered.kalman_gain[:, 0, -1]),
        design=np.array(filtered.design[0, :, -1]),
        unit=unit,
    )
    predicted = np.array(filtered.predicted_state[:, -1])
    parts = (made.transition, made.gain, made.design, predicted)
    return (made, predicted) if all(np.isfinite(part).all() for part in parts) else None
