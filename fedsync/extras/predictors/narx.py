"""NARX predictor of a silo's speed, from past speeds and from the load of the machine's processors and memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from fedsync.common.rng import Stream, generator
from fedsync.core.protocols import MachineLoad, SpeedSample
from fedsync.extras.predictors.small_network import Floats, Training, improve, one_thread, random_parameters, split
from fedsync.policies.predict.predictor_base import Hidden, Memory, PredictorPolicy
from fedsync.policies.schema import PositiveInt, register

LOOK_BACK = 2
_INPUTS = LOOK_BACK + 2 * (LOOK_BACK + 1)

_HELD_OUT = 0.2
_GAINS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4)
_ALPHA = 0.2
_FACTOR = 1.5
_TRUST = 0.02
_ROLLOUT = 4


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """Trained network in use, for inputs and outputs in their own units.

    Args:
        parameters: in normalised units, for further training.
        layer: W [hidden, inputs], bias [hidden], out [hidden], straight [inputs], constant: as in
            `fedsync.extras.predictors.small_network`, with the normalisation folded in.
        gain: rate at which the correction follows the errors.
        limit: largest error that counts in the correction [samples/s].
        low, high: limits of forecasts [samples/s], unless the last speeds lie outside.
    """

    parameters: Floats
    layer: Floats
    bias: Floats
    out: Floats
    straight: Floats
    constant: float
    gain: float
    limit: float
    low: float
    high: float

    def speed(self, inputs: list[float]) -> float:
        x = np.array(inputs)
        return float(self.out @ np.tanh(self.layer @ x + self.bias) + self.straight @ x) + self.constant

    def speeds(self, x: Floats) -> Floats:
        given: Floats = np.tanh(x @ self.layer.T + self.bias) @ self.out + x @ self.straight + self.constant
        return given


@dataclass(frozen=True, slots=True, eq=False)
class NarxState:
    """State of one silo.

    Args:
        average: moving average of the orders' speeds, used until there is a model.
        rows: newest of the ``seen`` windows, float64 [n, 3]: speed, cpu, memory.
        length: number of windows of the last order.
        start: initial parameters from another silo, or None.
        correction: addition to the model's output [samples/s].
        errors: recent mean squared errors of model and average.
        normal: mean and scale of the inputs of ``training``.
        due: number of observed windows at which the next training begins.
    """

    average: float | None
    rows: Floats
    seen: int
    length: int
    start: Floats | None
    model: Model | None
    correction: float
    errors: tuple[float, float]
    training: Training | None
    normal: tuple[Floats, Floats] | None
    due: int


@register("narx")
@dataclass(frozen=True, slots=True)
class Narx(PredictorPolicy[NarxState]):
    """Network over past speeds, processor load and memory use, trained on the windows that silos report.

    ``v_k = F(v_{k-1}, v_{k-2}, c_k, c_{k-1}, c_{k-2}, m_k, m_{k-1}, m_{k-2})``, F a network with one hidden layer.

    A step k is one *window* of an order, because an order as a whole gives too little data. F forecasts window after
    window of the next order, with its own outputs as past speeds and with the current processor load and memory use.
    The forecast is the mean over as many windows as the last order had. Known past speeds last for a few windows only,
    so all windows from the fourth on count as the fourth.

    Additions to the paper's model, besides the direct connections of `small_network`:
    - *Correction*: the slow part of F's past errors is added to its output. It captures effects that no input shows and
      that last longer than two windows (a hot processor, another machine). The rate of the correction is chosen on the
      held-out samples; a single error counts up to three standard deviations.
    - *Trust*: the moving average forecasts before there are ``samples`` windows (a fifth of that if training begins
      with another silo's weights), and whenever its own recent error is less than the model's.
    - *Guard*: each speed stays within a factor of 1.5 of the range of nearly all remembered speeds and the last two.

    Training continues after ``renew`` more windows, with early stopping on the held-out newest fifth of the windows.

    Source: LB-BSP, sections 3.2.2 (equation 4), 4 (online training) and 5.4.1.
    """

    samples: PositiveInt = 500
    """Number of windows of a silo before the first training; an order has several windows."""

    hidden: Hidden = 8
    """Width of the hidden layer."""

    memory: Memory = 2000
    """Number of newest windows used for training."""

    renew: PositiveInt = 50
    """Number of windows between two trainings."""

    learns = True

    def init(self) -> NarxState:
        return NarxState(None, np.empty((0, 3)), 0, 1, None, None, 0.0, (0.0, 0.0), None, None, self._first(None))

    def observe(self, state: NarxState, sample: SpeedSample) -> NarxState:
        average, errors, correction = state.average, state.errors, state.correction
        rows = _rows(sample)
        remembered = np.concatenate([state.rows, rows])
        if state.model is not None and average is not None:
            told = self._ask(state, state.model, sample.known)
            errors = _judged(errors, told - sample.speed, average - sample.speed)
            recent = remembered[-len(rows) - LOOK_BACK :]
            correction = _corrected(state.model, correction, recent)
        return replace(
            state,
            average=sample.speed if average is None else _ALPHA * sample.speed + (1 - _ALPHA) * average,
            rows=remembered[-self.memory :],
            seen=state.seen + len(rows),
            length=len(rows),
            correction=correction,
            errors=errors,
        )

    def forecast(self, state: NarxState, drivers: MachineLoad | None = None) -> float | None:
        if state.model is None or state.errors[0] > state.errors[1]:
            return state.average
        return self._ask(state, state.model, drivers)

    def unlearned(self, state: NarxState) -> bool:
        return state.training is not None or state.seen >= state.due

    def learn(self, state: NarxState, epochs: int) -> NarxState:
        if not self.unlearned(state):
            return state
        if state.training is None:
            state = self._begin(state)
        training, normal = state.training, state.normal
        assert training is not None and normal is not None
        with one_thread():
            for _ in range(epochs):
                training = improve(training)
                if training.ended:
                    return self._end(state, training, normal)
        return replace(state, training=training)

    def reuse(self, state: NarxState, donor: NarxState) -> NarxState:
        start = donor.start if donor.model is None else donor.model.parameters
        return state if start is None else replace(state, start=start, due=self._first(start))

    def promise(self, state: NarxState) -> float | None:
        """Recent squared error of the model relative to the average's; at first on the held-out windows."""
        return None if state.model is None else state.errors[0] / max(state.errors[1], 1e-300)

    def _first(self, start: Floats | None) -> int:
        fewest = self.samples if start is None else self.samples // 5
        return max(fewest, 20 + LOOK_BACK)

    def _ask(self, state: NarxState, model: Model, drivers: MachineLoad | None) -> float:
        v1: float
        v2: float
        (v2, c2, m2), (v1, c1, m1) = state.rows[-LOOK_BACK:].tolist()
        c0, m0 = (c1, m1) if drivers is None else (drivers.cpu, drivers.memory)
        low, high = min(model.low, v1 / _FACTOR, v2 / _FACTOR), max(model.high, v1 * _FACTOR, v2 * _FACTOR)
        total: float = 0.0
        steps = min(state.length, _ROLLOUT)
        for _ in range(steps):
            speed = model.speed([v1, v2, c0, c1, c2, m0, m1, m2]) + state.correction
            v2, v1 = v1, min(max(speed, low), high)
            c2, c1, m2, m1 = c1, c0, m1, m0
            total += v1
        return (total + (state.length - steps) * v1) / state.length

    def _begin(self, state: NarxState) -> NarxState:
        x, y = _table(state.rows)
        mean, scale = _normal(x)
        x, y = (x - mean) / scale, (y - mean[0]) / scale[0]
        held = max(int(_HELD_OUT * len(x)), 1)
        if state.model is not None:
            parameters = state.model.parameters
        elif state.start is not None:
            parameters = state.start
        else:
            parameters = random_parameters(_INPUTS, self.hidden, generator(0, Stream.MODEL, "narx"))
        training = Training(x[:-held], y[:-held], x[-held:], y[-held:], self.hidden, parameters)
        return replace(state, training=training, normal=(mean, scale))

    def _end(self, state: NarxState, training: Training, normal: tuple[Floats, Floats]) -> NarxState:
        x, y = _table(state.rows)
        model = _fold(training, *normal, y)
        given = model.speeds(x)
        limit = 3 * 1.4826 * float(np.median(np.abs(y - given))) + 1e-9
        held = max(int(_HELD_OUT * len(y)), 1)
        best, gain, correction = math.inf, 0.0, 0.0
        for tried in _GAINS:
            squares, after = _follow(given[-2 * held :], y[-2 * held :], tried, limit, held)
            if squares < 0.995 * best:
                best, gain, correction = squares, tried, after
        errors = state.errors
        if state.model is None or state.length == 1:
            errors = best, average_error(state.rows[:, 0], held)
        return replace(
            state,
            model=replace(model, gain=gain, limit=limit),
            correction=correction,
            errors=errors,
            training=None,
            normal=None,
            due=state.seen + self.renew,
        )


def _rows(sample: SpeedSample) -> Floats:
    """Windows of a sample, or the sample itself without windows, float64 [n, 3]; missing values are 0."""
    if not sample.windows:
        return np.array([[sample.speed, sample.cpu or 0.0, sample.memory or 0.0]])
    return np.array([[window.speed, window.cpu or 0.0, window.memory or 0.0] for window in sample.windows])


def _table(rows: Floats) -> tuple[Floats, Floats]:
    """Inputs [n - 2, 8] and targets [n - 2] from n windows."""
    v, c, m = rows.T
    x = np.stack([v[1:-1], v[:-2], c[2:], c[1:-1], c[:-2], m[2:], m[1:-1], m[:-2]], axis=1)
    return x, v[2:]


def _normal(x: Floats) -> tuple[Floats, Floats]:
    """Mean and scale of the inputs; both past speeds, and the target, use those of the first."""
    mean, scale = x.mean(axis=0), x.std(axis=0)
    # A constant input carries no information; a tiny scale would inflate its first small change.
    scale = np.where(scale < 1e-3 * np.maximum(np.abs(mean), 1e-3), np.maximum(np.abs(mean), 1e-3), scale)
    mean[1], scale[1] = mean[0], scale[0]
    return mean, scale


def _fold(training: Training, mean: Floats, scale: Floats, y: Floats) -> Model:
    """Return the model in its own units: W (x - mean) / scale = (W / scale) x - W (mean / scale)."""
    parameters = training.parameters if training.best is None else training.best
    layer, bias, out, straight, constant = split(parameters, training.hidden)
    low, high = np.quantile(y, [0.005, 0.995]).tolist()
    return Model(
        parameters=parameters,
        layer=layer / scale,
        bias=bias - layer @ (mean / scale),
        out=out * scale[0],
        straight=straight / scale * scale[0],
        constant=float((constant - straight @ (mean / scale)) * scale[0] + mean[0]),
        gain=0.0,
        limit=0.0,
        low=low / _FACTOR,
        high=high * _FACTOR,
    )


def _follow(
    given: Floats, y: Floats, gain: float, limit: float, held: int, correction: float = 0.0
) -> tuple[float, float]:
    squares, first = 0.0, len(y) - held
    for index, (output, speed) in enumerate(zip(given.tolist(), y.tolist(), strict=True)):
        error = speed - output - correction
        if index >= first:
            squares += error * error
        correction += gain * min(max(error, -limit), limit)
    return squares / held, correction


def _corrected(model: Model, correction: float, rows: Floats) -> float:
    if model.gain == 0.0:
        return 0.0
    x, y = _table(rows)
    return _follow(model.speeds(x), y, model.gain, model.limit, len(y), correction)[1]


def average_error(speeds: Floats, held: int) -> float:
    """Mean squared error of the moving average, one window ahead, over the last ``held`` windows."""
    average, squares = float(speeds[0]), 0.0
    for index, speed in enumerate(speeds.tolist()):
        if index >= len(speeds) - held:
            squares += (speed - average) ** 2
        average += _ALPHA * (speed - average)
    return squares / held


def _judged(errors: tuple[float, float], model: float, average: float) -> tuple[float, float]:
    """Update the recent mean squares by one error each; an error counts up to nine times the larger mean."""
    most = 9 * max(errors) or math.inf
    first, second = (
        mean + _TRUST * (min(error * error, most) - mean) for mean, error in zip(errors, (model, average), strict=True)
    )
    return first, second
