"""Recurrent networks that predict a silo's next speed from past speeds, trained by PyTorch."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedsync.common.rng import Stream, generator
from fedsync.core.protocols import MachineLoad, SpeedSample
from fedsync.extras.predictors.narx import average_error
from fedsync.policies.predict.predictor_base import Hidden, Memory, PredictorPolicy
from fedsync.policies.schema import PositiveInt, register

if TYPE_CHECKING:
    import torch

Floats = NDArray[np.float64]
Weights = Mapping[str, Floats]

LOOK_BACK = 2

_ALPHA = 0.2
_FACTOR = 2.0
_LATELY = 50
_HELD_OUT = 0.2
_BATCH = 128
_LEARNING_RATE = 0.01
_PATIENCE, _MOST_EPOCHS = 3, 30
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """Trained network.

    Args:
        weights: weights by their PyTorch names; ``out.weight`` and ``out.bias`` belong to the last layer.
        mean: mean of the training speeds [samples/s].
        scale: standard deviation of the training speeds [samples/s].
    """

    weights: Weights
    mean: float
    scale: float


@dataclass(frozen=True, slots=True, eq=False)
class Session:
    """Training in progress; ``stale`` counts epochs since ``best``, whose held-out error is ``error``."""

    speeds: Floats
    now: Trained
    best: Trained
    error: float = math.inf
    stale: int = 0
    epochs: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentState:
    """State of one silo; training begins when ``seen``, the number of observed orders, reaches ``due``."""

    average: float | None
    speeds: Floats
    seen: int
    trained: Trained | None
    session: Session | None
    due: int
    promise: float | None = None


@dataclass(frozen=True, slots=True)
class Recurrent(PredictorPolicy[RecurrentState]):
    """Recurrent cell over the last two speeds and a linear layer; a moving average (0.2) until it is trained.

    Its training data are the series that it forecasts, one speed per order. Training uses Adam on the remembered speeds
    in batches of 128, stops early on the newest fifth, and continues after ``renew`` orders. A forecast lies within a
    factor of 2 of the least and greatest of the last 50 speeds. Only training needs PyTorch: a forecast is two steps of
    the cell in NumPy.

    Source: LB-BSP, sections 3.2.2 and 5.4.1 (SimpleRNN and LSTM, look-back 2).
    """

    samples: PositiveInt = 500
    """Number of orders of a silo before the first training."""

    hidden: Hidden = 16
    """Width of the recurrent layer."""

    memory: Memory = 1000
    """Number of newest orders used for training."""

    renew: PositiveInt = 100
    """Number of orders between two trainings."""

    learns = True
    layer: ClassVar[str]

    def cell(self) -> torch.nn.RNNBase:
        """Return PyTorch's ``layer``: one input, ``hidden`` outputs, batch first."""
        import torch

        made: torch.nn.RNNBase = getattr(torch.nn, self.layer)(1, self.hidden, batch_first=True)
        return made

    @abstractmethod
    def output(self, weights: Weights, inputs: list[float]) -> float:
        """Return the network's output for normalised speeds, the oldest first."""

    def init(self) -> RecurrentState:
        return RecurrentState(None, np.empty(0), 0, None, None, max(self.samples, 10 * LOOK_BACK))

    def observe(self, state: RecurrentState, sample: SpeedSample) -> RecurrentState:
        speed, average = sample.speed, state.average
        return replace(
            state,
            average=speed if average is None else _ALPHA * speed + (1 - _ALPHA) * average,
            speeds=np.append(state.speeds, speed)[-self.memory :],
            seen=state.seen + 1,
        )

    def forecast(self, state: RecurrentState, drivers: MachineLoad | None = None) -> float | None:
        trained = state.trained
        if trained is None:
            return state.average
        lately: list[float] = state.speeds[-_LATELY:].tolist()
        inputs = [(speed - trained.mean) / trained.scale for speed in lately[-LOOK_BACK:]]
        speed = self.output(trained.weights, inputs) * trained.scale + trained.mean
        return min(max(speed, min(lately) / _FACTOR), max(lately) * _FACTOR)

    def unlearned(self, state: RecurrentState) -> bool:
        return state.session is not None or state.seen >= state.due

    def learn(self, state: RecurrentState, epochs: int) -> RecurrentState:
        """Train for at most ``epochs`` epochs; the network is replaced when training has ended."""
        if epochs < 1 or not self.unlearned(state):
            return state
        session = state.session or self._begin(state)
        session = self._on_one_thread(session, epochs)
        if session.stale < _PATIENCE and session.epochs < _MOST_EPOCHS:
            return replace(state, session=session)
        error = session.error * session.best.scale**2
        held = max(int(_HELD_OUT * (len(session.speeds) - LOOK_BACK)), 1)
        # After a constant speed the average's error is 0, so the reference error is at least the rounding error.
        least = _ROUNDING * session.best.mean**2
        return replace(
            state,
            trained=session.best,
            session=None,
            due=state.seen + self.renew,
            promise=error / max(average_error(session.speeds, held), least),
        )

    def promise(self, state: RecurrentState) -> float | None:
        return state.promise

    def _begin(self, state: RecurrentState) -> Session:
        speeds = state.speeds
        mean = float(speeds.mean())
        trained = Trained({}, mean, max(float(speeds.std()), 1e-3 * mean))
        start = state.trained.weights if state.trained is not None else self._first_weights()
        trained = replace(trained, weights=start)
        return Session(speeds, trained, trained)

    def _first_weights(self) -> Weights:
        """Draw uniformly within ``+-1 / sqrt(hidden)``, as PyTorch does, from a separate generator."""
        draw, width = generator(0, Stream.MODEL, type(self).__name__), self.hidden**-0.5
        shapes = {name: tuple(value.shape) for name, value in self._network().state_dict().items()}
        return {name: draw.uniform(-width, width, shape) for name, shape in shapes.items()}

    def _network(self) -> torch.nn.ModuleDict:
        import torch

        # `fork_rng` keeps PyTorch's own initialisation, which is overwritten, from changing its global generator.
        with torch.random.fork_rng(devices=[]):
            return torch.nn.ModuleDict({"cell": self.cell(), "out": torch.nn.Linear(self.hidden, 1)}).double()

    def _on_one_thread(self, session: Session, epochs: int) -> Session:
        """Train on one thread, for the reasons in `fedsync.extras.predictors.small_network`."""
        import torch

        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return self._train(session, epochs)
        finally:
            torch.set_num_threads(threads)

    def _train(self, session: Session, epochs: int) -> Session:
        import torch

        now = session.now
        network = self._network()
        network.load_state_dict({name: torch.tensor(value) for name, value in now.weights.items()})
        series = torch.tensor((session.speeds - now.mean) / now.scale)
        x, y = series.unfold(0, LOOK_BACK, 1)[:-1, :, None], series[LOOK_BACK:]
        held = max(int(_HELD_OUT * len(y)), 1)
        optimiser = torch.optim.Adam(network.parameters(), lr=_LEARNING_RATE)

        def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            given = network["out"](network["cell"](inputs)[0][:, -1])[:, 0]
            return torch.nn.functional.mse_loss(given, targets)

        for _ in range(min(epochs, _MOST_EPOCHS - session.epochs)):
            for first in range(0, len(y) - held, _BATCH):
                batch = slice(first, min(first + _BATCH, len(y) - held))
                optimiser.zero_grad(set_to_none=True)
                loss(x[batch], y[batch]).backward()  # type: ignore[no-untyped-call]  # PyTorch does not annotate it
                optimiser.step()
            with torch.no_grad():
                error = float(loss(x[-held:], y[-held:]))
            weights = {name: value.detach().numpy().copy() for name, value in network.state_dict().items()}
            now = replace(now, weights=weights)
            better = error < 0.999 * session.error
            session = replace(
                session,
                now=now,
                best=now if better else session.best,
                error=error if better else session.error,
                stale=0 if better else session.stale + 1,
                epochs=session.epochs + 1,
            )
            if session.stale >= _PATIENCE:
                break
        return session


def _finish(weights: Weights, state: Floats) -> float:
    return float(weights["out.weight"][0] @ state + weights["out.bias"][0])


@register("rnn")
@dataclass(frozen=True, slots=True)
class RnnPredictor(Recurrent):
    """Plain recurrent network over the last two speeds; a moving average before ``samples`` orders.

    ``h <- tanh(W_x v + b_x + W_h h + b_h)``; see `Recurrent` for the rest.
    """

    layer = "RNN"

    def output(self, weights: Weights, inputs: list[float]) -> float:
        read, keep = weights["cell.weight_ih_l0"][:, 0], weights["cell.weight_hh_l0"]
        bias = weights["cell.bias_ih_l0"] + weights["cell.bias_hh_l0"]
        state = np.tanh(read * inputs[0] + bias)
        for speed in inputs[1:]:
            state = np.tanh(read * speed + bias + keep @ state)
        return _finish(weights, state)


@register("lstm")
@dataclass(frozen=True, slots=True)
class LstmPredictor(Recurrent):
    """Network with long short-term memory over the last two speeds; a moving average before ``samples`` orders.

    Gates i, f, o and candidate g: ``c <- f c + i g``, ``h <- o tanh(c)``; see `Recurrent` for the rest.
    """

    layer = "LSTM"

    def output(self, weights: Weights, inputs: list[float]) -> float:
        read, keep = weights["cell.weight_ih_l0"][:, 0], weights["cell.weight_hh_l0"]
        bias = weights["cell.bias_ih_l0"] + weights["cell.bias_hh_l0"]
        size = self.hidden
        state, memory = np.zeros(size), np.zeros(size)
        for speed in inputs:
            gates = read * speed + bias + keep @ state
            # 1 / (1 + exp(-x)) without overflow; the third part, g, is a tanh of the gates themselves.
            open_ = 0.5 + 0.5 * np.tanh(0.5 * gates)
            memory = open_[size : 2 * size] * memory + open_[:size] * np.tanh(gates[2 * size : 3 * size])
            state = open_[3 * size :] * np.tanh(memory)
        return _finish(weights, state)
