from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedsync.core.errors import ConfigError
from fedsync.train.weights import TaskModel, Weights, initial_model
from tests.train.make import TwoClasses


class Tied(nn.Module):
    """One matrix used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 3, bias=False)
        self.out = nn.Linear(3, 3, bias=False)
        self.out.weight = self.embed.weight


def test_a_vector_survives_the_round_trip() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    weights = Weights(module)
    vector = np.arange(weights.layout.size, dtype=np.float32)
    weights.load(vector)
    np.testing.assert_array_equal(weights.read(), vector)
    parts = weights.layout.split(vector)
    np.testing.assert_array_equal(module[0].weight.detach().numpy(), parts["0.weight"])
    assert int(module[1].num_batches_tracked) == parts["1.num_batches_tracked"]


def test_integer_buffers_are_rounded() -> None:
    module = nn.BatchNorm1d(1)
    weights = Weights(module)
    vector = weights.read()
    vector[-1] = 2.6
    weights.load(vector)
    assert int(module.num_batches_tracked) == 3


def test_tied_weights_travel_once() -> None:
    assert Weights(Tied()).layout.names == ("embed.weight",)


@pytest.mark.parametrize(
    ("vector", "message"),
    [(np.zeros(5, np.float32), "has 6 values"), (np.full(6, np.nan, np.float32), "not finite")],
)
def test_bad_vectors_never_reach_the_model(vector: np.ndarray, message: str) -> None:
    module = nn.Linear(2, 2)
    before = Weights(module).read()
    with pytest.raises(ValueError, match=message):
        Weights(module).load(vector)
    np.testing.assert_array_equal(Weights(module).read(), before)


@pytest.mark.parametrize("module", [nn.ReLU(), nn.Linear(1, 1, dtype=torch.complex64)])
def test_models_that_cannot_travel(module: nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"task\.model"):
        Weights(module)


def test_a_saved_model_loads_with_torch_alone(tmp_path: Path) -> None:
    task = TwoClasses()
    vector, layout = initial_model(task, seed=7)
    TaskModel(task, seed=8).save_model(tmp_path / "model.pt", vector)
    module = task.model()
    module.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    np.testing.assert_array_equal(Weights(module).read(), vector)
    assert layout.names == tuple(module.state_dict())


def test_every_silo_starts_from_the_same_model() -> None:
    first, _ = initial_model(TwoClasses(), seed=7)
    torch.rand(5)
    again, _ = initial_model(TwoClasses(), seed=7)
    other, _ = initial_model(TwoClasses(), seed=8)
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
