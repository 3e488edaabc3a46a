"""Speed from past speeds and from what the machine's processors and memory are doing."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedsync.common.errors import ConfigError
from fedsync.common.rng import Stream, generator
from fedsync.core.protocols import Drivers, SpeedSample
from fedsync.policies.predict.predictor_base import Hidden, Memory, PredictorPolicy
from fedsync.policies.predict.small_network import Floats, Training, improve, random_parameters, split
from fedsync.policies.predict.threads import one_thread
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
    """A trained network in use, for inputs and outputs in their own units.

    Args:
        parameters: in normalised units, to train on.
        layer: W [hidden, inputs], bias [hidden], out [hidden], straight [inputs], constant: as in
            `fedsync.policies.predict.small_network`, with the normalisation folded in.
        gain: how fast the correction follows the errors.
        limit: errors count up to this size in the correction [samples/s].
        low: no forecast is below [samples/s], unless the last speeds were.
        high: none is above, likewise.
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
        """Output for one row of inputs, before any correction [samples/s]."""
        x = np.array(inputs)
        return float(self.out @ np.tanh(self.layer @ x + self.bias) + self.straight @ x) + self.constant

    def speeds(self, x: Floats) -> Floats:
        """Outputs [n] for inputs [n, inputs]."""
        given: Floats = np.tanh(x @ self.layer.T + self.bias) @ self.out + x @ self.straight + self.constant
        return given


@dataclass(frozen=True, slots=True, eq=False)
class NarxState:
    """What is known of one silo.

    Args:
        average: moving average of the orders' speeds, which stands in for the model; None before the first.
        rows: newest windows, float64 [n, 3]: speed, cpu, memory.
        seen: windows in all.
        length: windows of the last order.
        start: parameters for training to begin with, from elsewhere.
        model: in use, if there is one.
        correction: what is added to its output [samples/s].
        errors: recent mean squared errors of model and average.
        training: in work, if any.
        normal: mean and scale of its inputs.
        due: training begins when so many windows were seen.
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
    """A network over past speeds, processors and memory, trained on the windows that silos report.

    ``v_k = F(v_{k-1}, v_{k-2}, c_k, c_{k-1}, c_{k-2}, m_k, m_{k-1}, m_{k-2})``, F a network with one hidden layer.

    A step k is one *window* of an order, for one order is too little to learn from. The order to be forecast has
    many windows, of which the first is the next one: F is asked window after window, its own answers as past speeds and
    the processors and the memory as they are now, and the forecast is the mean over as many windows as the last
    order had. Past speeds are used up after a few windows, so all from the fourth on count as the fourth. A silo that
    reports no windows has orders of one.

    Besides the paper's model:

    - *Correction*: the slow part of F's past errors is added to its output. What no column shows and what lasts
      longer than two windows (a hot processor, another machine) is found there. How fast it follows is chosen on
      the held-out samples; a single error counts up to three standard deviations.
    - *Trust*: the moving average forecasts before there are ``samples`` windows (a fifth of that if training begins
      with another model's weights), and whenever its own recent error is less than the model's.
    - *Guard*: a forecast is at most 1.5 times as far out as nearly all speeds that are remembered, or the last two.

    Training begins again after ``renew`` more windows, where it ended the last time; it stops early on the newest fifth
    of the windows remembered, which it does not train on.

    Source: LB-BSP, sections 3.2.2 (equation 4), 4 (online training) and 5.4.1.
    """

    samples: PositiveInt = 500
    """Windows of a silo before the first training; an order has several."""

    hidden: Hidden = 8
    """Width of the hidden layer."""

    memory: Memory = 2000
    """Newest windows that it is trained on."""

    renew: PositiveInt = 50
    """Windows between two trainings."""

    warm_start: str | None = None
    """The ``predictor.json`` of a former run, as a path from where the server runs: training begins there, and
    sooner."""

    learns = True

    @property
    def start(self) -> tuple[float, ...] | None:
        """Parameters of a former run to begin with, or None; see `loaded`."""
        return None

    def loaded(self) -> Narx:
        if self.warm_start is None:
            return self
        try:
            content = json.loads(Path(self.warm_start).read_text(encoding="utf-8"))
            start = load(content if isinstance(content, dict) else {}, self.hidden)
        except (OSError, ValueError) as error:
            raise ConfigError(
                "predictor.warm_start",
                f"{self.warm_start}: {error}",
                "Name the predictor.json in the folder of a run whose narx has the same `hidden`, or leave it out",
            ) from error
        return WarmNarx(self.samples, self.hidden, self.memory, self.renew, self.warm_start, start)

    def init(self) -> NarxState:
        start = None if self.start is None else np.array(self.start)
        return NarxState(None, np.empty((0, 3)), 0, 1, start, None, 0.0, (0.0, 0.0), None, None, self._first(start))

    def observe(self, state: NarxState, sample: SpeedSample) -> NarxState:
        """Remembers the order's windows and sees how good the last forecast was; never trains."""
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

    def forecast(self, state: NarxState, drivers: Drivers | None = None) -> float | None:
        """The model's mean speed over the next order [samples/s]; see the class for when it is the average."""
        if state.model is None or state.errors[0] > state.errors[1]:
            return state.average
        return self._ask(state, state.model, drivers)

    def unlearned(self, state: NarxState) -> bool:
        """Whether training is in work or due."""
        return state.training is not None or state.seen >= state.due

    def learn(self, state: NarxState, epochs: int) -> NarxState:
        """Train for at most so many passes; the model is replaced when training has ended."""
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
        """Begin training with the donor's parameters, and sooner."""
        start = donor.start if donor.model is None else donor.model.parameters
        return state if start is None else replace(state, start=start, due=self._first(start))

    def promise(self, state: NarxState) -> float | None:
        """Recent squared error of the model against the average's, at first that on the held-out windows."""
        return None if state.model is None else state.errors[0] / max(state.errors[1], 1e-300)

    def export(self, state: NarxState) -> dict[str, Any] | None:
        """Size of the hidden layer and parameters."""
        if state.model is None:
            return None
        return {"kind": "narx", "hidden": self.hidden, "parameters": state.model.parameters.tolist()}

    def _first(self, start: Floats | None) -> int:
        fewest = self.samples if start is None else self.samples // 5
        return max(fewest, 20 + LOOK_BACK)

    def _ask(self, state: NarxState, model: Model, drivers: Drivers | None) -> float:
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
        """Put the trained network to use; its gain and its correction follow from the newest windows."""
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
            errors = best, _average_error(state.rows[:, 0], held)
        return replace(
            state,
            model=replace(model, gain=gain, limit=limit),
            correction=correction,
            errors=errors,
            training=None,
            normal=None,
            due=state.seen + self.renew,
        )


@dataclass(frozen=True, slots=True)
class WarmNarx(Narx):
    """`Narx` with the parameters that its ``warm_start`` names."""

    start: tuple[float, ...] | None = None


def load(content: Mapping[str, Any], hidden: int) -> tuple[float, ...]:
    """Parameters that `Narx.export` has written.

    Raises:
        ValueError: they are not, or not for a hidden layer of this size.
    """
    expected = hidden * (_INPUTS + 2) + _INPUTS + 1
    parameters = content.get("parameters")
    if content.get("kind") != "narx" or not isinstance(parameters, list):
        raise ValueError("not the weights of a narx predictor")
    if content.get("hidden") != hidden or len(parameters) != expected:
        raise ValueError(f"weights for a hidden layer of {content.get('hidden')}, not of {hidden}")
    numbers = tuple(float(number) for number in parameters)
    if not all(math.isfinite(number) for number in numbers):
        raise ValueError("weights that are not finite")
    return numbers


def _rows(sample: SpeedSample) -> Floats:
    """Windows of a sample, float64 [n, 3]; the sample itself where it has none. 0 stands for what is not told."""
    if not sample.windows:
        return np.array([[sample.speed, sample.cpu or 0.0, sample.memory or 0.0]])
    return np.array([[window.speed, window.cpu or 0.0, window.memory or 0.0] for window in sample.windows])


def _table(rows: Floats) -> tuple[Floats, Floats]:
    """Inputs [n - 2, 8] and targets [n - 2] of n windows."""
    v, c, m = rows.T
    x = np.stack([v[1:-1], v[:-2], c[2:], c[1:-1], c[:-2], m[2:], m[1:-1], m[:-2]], axis=1)
    return x, v[2:]


def _normal(x: Floats) -> tuple[Floats, Floats]:
    """Mean and scale of the inputs; the first two, and the target, have those of the first."""
    mean, scale = x.mean(axis=0), x.std(axis=0)
    # What does not vary says nothing: it must not be blown up when it moves a little one day.
    scale = np.where(scale < 1e-3 * np.maximum(np.abs(mean), 1e-3), np.maximum(np.abs(mean), 1e-3), scale)
    mean[1], scale[1] = mean[0], scale[0]
    return mean, scale


def _fold(training: Training, mean: Floats, scale: Floats, y: Floats) -> Model:
    """The model in units of its own: W (x - mean) / scale = (W / scale) x - W (mean / scale)."""
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


def _follow(given: Floats, y: Floats, gain: float, limit: float, held: int) -> tuple[float, float]:
    """Mean squared error of the corrected outputs over the last ``held``, and the correction after all of them."""
    correction, squares, first = 0.0, 0.0, len(y) - held
    for index, (output, speed) in enumerate(zip(given.tolist(), y.tolist(), strict=True)):
        error = speed - output - correction
        if index >= first:
            squares += error * error
        correction += gain * min(max(error, -limit), limit)
    return squares / held, correction


def _corrected(model: Model, correction: float, rows: Floats) -> float:
    """The correction after the newest windows, given with the two before them."""
    if model.gain == 0.0:
        return 0.0
    x, y = _table(rows)
    for output, speed in zip(model.speeds(x).tolist(), y.tolist(), strict=True):
        error = speed - output - correction
        correction += model.gain * min(max(error, -model.limit), model.limit)
    return correction


def _average_error(speeds: Floats, held: int) -> float:
    """Mean squared error of the moving average, one window ahead, over the last ``held``."""
    average, squares = float(speeds[0]), 0.0
    for index, speed in enumerate(speeds.tolist()):
        if index >= len(speeds) - held:
            squares += (speed - average) ** 2
        average += _ALPHA * (speed - average)
    return squares / held


def _judged(errors: tuple[float, float], model: float, average: float) -> tuple[float, float]:
    """Recent mean squares after one more error of each; one error counts up to nine times the larger mean."""
    most = 9 * max(errors) or math.inf
    first, second = (
        mean + _TRUST * (min(error * error, most) - mean) for mean, error in zip(errors, (model, average), strict=True)
    )
    return first, second
