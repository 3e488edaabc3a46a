"""The recurrent predictors: NumPy's forecast against PyTorch's network, and training."""

import numpy as np
import pytest
import torch

from fedsync.core.protocols import SpeedSample
from fedsync.extras.predictors.recurrent import LstmPredictor, Recurrent, RecurrentState, RnnPredictor

KINDS = pytest.mark.parametrize("kind", [RnnPredictor, LstmPredictor])


def seen(predictor: Recurrent, speeds: list[float]) -> RecurrentState:
    state = predictor.init()
    for speed in speeds:
        state = predictor.observe(state, SpeedSample(speed))
    return state


@KINDS
def test_the_forecast_is_what_pytorch_computes(kind: type[Recurrent]) -> None:
    predictor = kind(hidden=5)
    draw = np.random.default_rng(4)
    cell, out = predictor.cell().double(), torch.nn.Linear(5, 1).double()
    network = torch.nn.ModuleDict({"cell": cell, "out": out})
    weights = {name: draw.normal(size=tuple(value.shape)) for name, value in network.state_dict().items()}
    network.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})
    expected = out(cell(torch.tensor([[[0.3], [-1.2]]], dtype=torch.float64))[0][:, -1]).item()
    assert predictor.output(weights, [0.3, -1.2]) == pytest.approx(expected, rel=1e-12)


@KINDS
def test_it_learns_that_fast_follows_slow(kind: type[Recurrent]) -> None:
    """100, 200, 100...: the moving average is some 50 off, always."""
    predictor = kind(samples=200)
    state = seen(predictor, [100.0, 200.0] * 100)
    while predictor.unlearned(state):
        state = predictor.learn(state, 10)
    assert predictor.forecast(state) == pytest.approx(100.0, abs=20)
    assert (predictor.promise(state) or 1.0) < 0.2


@KINDS
def test_training_draws_nothing_from_pytorch_and_repeats(kind: type[Recurrent]) -> None:
    predictor = kind(samples=40, hidden=4)
    state = seen(predictor, np.random.default_rng(1).uniform(50, 60, 40).tolist())
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    first, second = predictor.learn(state, 30), predictor.learn(state, 30)
    assert predictor.forecast(first) == predictor.forecast(second)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


@pytest.mark.slow
@KINDS
def test_after_a_constant_speed_the_promise_is_still_a_ratio(kind: type[Recurrent]) -> None:
    """The average's error is 0; what counts in its place is 1e-12 of the squared speed, whatever the unit is."""
    promises = []
    for speed in (1e-9, 37.2, 1e8):
        predictor = kind(samples=200)
        state = seen(predictor, [speed] * 200)
        while predictor.unlearned(state):
            state = predictor.learn(state, 10)
        promises.append(predictor.promise(state))
    assert promises[0] is not None
    assert 0.0 <= promises[0] < 1e6
    assert promises == pytest.approx([promises[0]] * 3, rel=1e-3)
