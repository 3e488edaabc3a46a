"""Small immutable feed-forward network: one hidden layer of tanh, plus direct connections from inputs to output.

``y = w . tanh(W x + b) + s . x + c``. With some hundred parameters and a few thousand samples, the method of Levenberg
and Marquardt takes a handful of passes of a millisecond each; gradient descent takes thousands. Huber's loss limits the
influence of rare stalls of the machine. (scikit-learn's ``MLPRegressor`` is mutable, and has only gradient methods and
squared errors.)
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray


@cache
def _controller() -> Any:
    # Finding the libraries with threads takes milliseconds, limiting them microseconds.
    import numpy as np
    from threadpoolctl import ThreadpoolController

    assert np  # NumPy's BLAS must be loaded to be found
    return ThreadpoolController()


def one_thread() -> AbstractContextManager[object]:
    """Context in which NumPy's linear algebra runs on one thread. Several threads are slower for small matrices, and
    their sums depend on the number of threads, so that a replay on another machine could differ.
    """
    limit: AbstractContextManager[object] = _controller().limit(limits=1, user_api="blas")
    return limit


Floats = NDArray[np.float64]

HUBER = 3.0
"""Number of robust standard deviations beyond which errors count linearly."""

DECAY = 1.0
"""Weight decay: half its product with the squared norm of the parameters is added to the summed loss."""

PATIENCE, MOST_EPOCHS = 6, 60
"""Passes without improvement on the held-out samples, and passes in all, before training ends."""

_TRIES = 6


def random_parameters(inputs: int, hidden: int, draw: np.random.Generator) -> Floats:
    """Initial parameters, float64 [hidden (inputs + 2) + inputs + 1], with output 0 everywhere."""
    weights = draw.normal(0.0, inputs**-0.5, hidden * inputs)
    return np.concatenate([weights, draw.normal(0.0, 0.5, hidden), np.zeros(hidden + inputs + 1)])


def split(parameters: Floats, hidden: int) -> tuple[Floats, Floats, Floats, Floats, float]:
    """Return the parts W [hidden, inputs], b [hidden], w [hidden], s [inputs], c."""
    inputs = (len(parameters) - 2 * hidden - 1) // (hidden + 1)
    layer, bias, out, straight = np.split(
        parameters[:-1], [hidden * inputs, hidden * (inputs + 1), hidden * (inputs + 2)]
    )
    return layer.reshape(hidden, inputs), bias, out, straight, float(parameters[-1])


def outputs(parameters: Floats, hidden: int, x: Floats) -> tuple[Floats, Floats]:
    """Return outputs [n] and activations of the hidden layer [n, hidden] for inputs [n, inputs]."""
    layer, bias, out, straight, constant = split(parameters, hidden)
    active = np.tanh(x @ layer.T + bias)
    return active @ out + x @ straight + constant, active


@dataclass(frozen=True, slots=True, eq=False)
class Training:
    """Training in progress.

    Args:
        x, held_x: inputs, float64 [n, inputs], about standard normal; held-out samples are for early stopping.
        y, held_y: targets, float64 [n], about standard normal.
        damping: of Levenberg and Marquardt, relative to n.
        best: parameters with the least loss on the held-out samples, ``stale`` passes ago.
    """

    x: Floats
    y: Floats
    held_x: Floats
    held_y: Floats
    hidden: int
    parameters: Floats
    damping: float = 1e-2
    best: Floats | None = None
    loss: float = np.inf
    stale: int = 0
    epochs: int = 0
    ended: bool = False


def improve(training: Training) -> Training:
    """Make one step of Levenberg and Marquardt over all samples; the damping rises until the loss falls."""
    parameters, damping, x, y = training.parameters, training.damping, training.x, training.y
    given, active = outputs(parameters, training.hidden, x)
    error = given - y
    limit = HUBER * 1.4826 * float(np.median(np.abs(error))) + 1e-9
    weight = np.minimum(1.0, limit / np.maximum(np.abs(error), 1e-300))
    slopes = _slopes(parameters, training.hidden, x, active)
    curvature = (slopes * weight[:, None]).T @ slopes
    gradient = slopes.T @ (weight * error) + DECAY * parameters
    before = _loss(error, limit) + 0.5 * DECAY * float(parameters @ parameters)
    identity = np.eye(len(parameters))
    for _ in range(_TRIES):
        step = np.linalg.solve(curvature + (DECAY + damping * len(x)) * identity, gradient)
        tried = parameters - step
        after = _loss(outputs(tried, training.hidden, x)[0] - y, limit) + 0.5 * DECAY * float(tried @ tried)
        if after < before:
            break
        damping *= 4.0
    else:
        return replace(training, best=parameters if training.best is None else training.best, ended=True)
    held = np.abs(outputs(tried, training.hidden, training.held_x)[0] - training.held_y)
    loss = float(np.mean(np.minimum(held, limit) ** 2))
    better = loss < training.loss * (1 - 1e-4)
    stale, epochs = 0 if better else training.stale + 1, training.epochs + 1
    return replace(
        training,
        parameters=tried,
        damping=max(damping / 5.0, 1e-7),
        best=tried if better else training.best,
        loss=loss if better else training.loss,
        stale=stale,
        epochs=epochs,
        ended=stale >= PATIENCE or epochs >= MOST_EPOCHS,
    )


def _slopes(parameters: Floats, hidden: int, x: Floats, active: Floats) -> Floats:
    """Derivatives of the outputs by the parameters, float64 [n, parameters]."""
    _, _, out, _, _ = split(parameters, hidden)
    inner = (1.0 - active * active) * out
    layer = (inner[:, :, None] * x[:, None, :]).reshape(len(x), -1)
    return np.concatenate([layer, inner, active, x, np.ones((len(x), 1))], axis=1)


def _loss(error: Floats, limit: float) -> float:
    size = np.abs(error)
    return float(np.where(size < limit, 0.5 * error * error, limit * (size - 0.5 * limit)).sum())
