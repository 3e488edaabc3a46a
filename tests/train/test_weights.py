from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsync.common.errors import ConfigError
from fedsync.model.chunked_arrays import SPAN_BYTES, map_file
from fedsync.model.running_statistics import statistics_of
from fedsync.train.weights import TaskModel, Weights, save_state, say_rounded
from tests.memory import traced
from tests.train.make import TwoClasses


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 3, bias=False)
        self.out = nn.Linear(3, 3, bias=False)
        self.out.weight = self.embed.weight


def test_a_vector_survives_the_round_trip_and_integer_buffers_are_rounded() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    weights = Weights(module)
    vector = np.arange(weights.layout.size, dtype=np.float32)
    weights.load(vector)
    np.testing.assert_array_equal(weights.read(), vector)
    parts = weights.layout.split(vector)
    np.testing.assert_array_equal(module[0].weight.detach().numpy(), parts["0.weight"])
    assert int(module[1].num_batches_tracked) == parts["1.num_batches_tracked"]
    vector[-1] = 2.6
    weights.load(vector)
    assert int(module[1].num_batches_tracked) == 3


def test_a_log_names_integers_that_float32_changes(caplog: pytest.LogCaptureFixture) -> None:
    module = nn.BatchNorm1d(2)
    module.register_buffer("hashes", torch.tensor([1, 2**24 + 1]))
    say_rounded.cache_clear()
    Weights(module)
    assert [each.getMessage().rpartition(": ")[2] for each in caplog.records] == ["hashes"]


def test_buffers_are_named_and_no_variance_is_below_zero() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    weights = Weights(module)
    assert weights.layout.buffers == ("1.running_mean", "1.running_var", "1.num_batches_tracked")
    weights.load(np.full(weights.layout.size, -0.25, np.float32))
    read = weights.layout.split(weights.read())
    assert not read["1.running_var"].any() and (read["1.running_mean"] == -0.25).all()
    assert Weights(nn.BatchNorm1d(3, affine=False)).layout.buffers == (), "a module of buffers alone trains them"


class Split(nn.Module):
    """A module whose state dict has views of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.zeros(4))
        self.register_buffer("mine", torch.zeros(1))

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        return {"one": self.both[:2], "two": self.both[2:], "mine": self.mine}  # type: ignore[dict-item]


def test_statistics_that_keras_keeps_as_parameters_are_running_statistics() -> None:
    module = nn.Linear(2, 1)
    name = "sequential/batch_normalization/moving_variance"
    module.register_parameter(name, nn.Parameter(torch.ones(2), requires_grad=False))
    weights = Weights(module)
    ((start, stop),) = statistics_of(weights.layout)
    assert list(weights.layout.split(np.arange(5.0, dtype=np.float32))[name]) == list(range(start, stop))
    weights.load(np.full(5, -1.0, np.float32))
    assert not weights.layout.split(weights.read())[name].any()


def test_views_of_a_parameter_are_no_buffers() -> None:
    assert Weights(Split()).layout.buffers == ("mine",)


def test_tied_weights_travel_once() -> None:
    assert Weights(Tied()).layout.names == ("embed.weight",)


@pytest.mark.parametrize(
    ("vector", "message"), [(np.zeros(5, np.float32), "has 6 values"), (np.full(6, np.nan, np.float32), "not finite")]
)
def test_bad_vectors_never_reach_the_model(vector: np.ndarray, message: str) -> None:
    module = nn.Linear(2, 2)
    before = Weights(module).read()
    with pytest.raises(ValueError, match=message):
        Weights(module).load(vector)
    np.testing.assert_array_equal(Weights(module).read(), before)


def test_a_buffer_that_grows_in_training_is_named() -> None:
    module = nn.BatchNorm1d(2)
    weights = Weights(module)
    module.running_mean = torch.zeros(4)
    for use in (weights.read, lambda: weights.load(np.zeros(9, np.float32))):
        with pytest.raises(ConfigError, match=r"the shape of running_mean from \[2\] to \[4\]"):
            use()


@pytest.mark.parametrize("module", [nn.ReLU(), nn.Linear(1, 1, dtype=torch.complex64)])
def test_models_that_cannot_travel(module: nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"task\.model"):
        Weights(module)


class Copying(nn.Linear):
    """A model whose state dict holds copies, as one does that moves them to the CPU."""

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        return {name: tensor.clone() for name, tensor in super().state_dict(*arguments, **options).items()}


class Forgetting(nn.Linear):
    """A model whose state dict lacks what it trains."""

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        return {"weight": super().state_dict(*arguments, **options)["weight"]}


@pytest.mark.parametrize(("module", "name"), [(Copying(2, 1), "weight"), (Forgetting(2, 1), "bias")])
def test_a_trained_parameter_that_no_vector_would_set_is_refused(module: nn.Module, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"trains {name}, and its state_dict\(\) leaves it out or copies it"):
        Weights(module)
    assert Weights(module.requires_grad_(False)).layout.names[0] == "weight"


class Wrapping(nn.Module):
    """A model with the state dict of another model, which detaches its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 1)

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        return self.inner.state_dict()


def test_a_trained_parameter_that_the_state_dict_detaches_travels() -> None:
    module = Wrapping()
    weights = Weights(module)
    weights.load(np.arange(3, dtype=np.float32))
    assert weights.layout.names == ("weight", "bias")
    assert [parameter.flatten().tolist() for parameter in module.parameters()] == [[0.0, 1.0], [2.0]]


def test_a_saved_model_loads_with_torch_alone(tmp_path: Path) -> None:
    task = TwoClasses()
    built = TaskModel(task, seed=7)
    vector = built.initial()
    TaskModel(task, seed=8).save_model(tmp_path / "model.pt", vector)
    module = task.model()
    module.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    np.testing.assert_array_equal(Weights(module).read(), vector)
    assert built.layout.names == tuple(module.state_dict())


class OnGpu(torch.Tensor):
    """Tensor that only `cpu` makes a plain tensor, as of a GPU."""

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()


def test_a_model_from_a_gpu_loads_on_a_machine_without_one(tmp_path: Path) -> None:
    """Without a GPU: ``weights_only`` refuses tensors of a class of one's own, as CUDA tensors are refused."""
    state = {name: tensor.as_subclass(OnGpu) for name, tensor in Tied().state_dict().items()}
    save_state(tmp_path / "model.pt", state)
    loaded = torch.load(tmp_path / "model.pt", weights_only=True)
    assert loaded["embed.weight"].data_ptr() == loaded["out.weight"].data_ptr(), "tied weights stay tied"
    torch.testing.assert_close(loaded["out.weight"], state["out.weight"].cpu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("place", [torch.contiguous_format, torch.channels_last])
def test_tensors_of_any_type_and_order_are_set_from_what_nobody_may_write_to(
    dtype: torch.dtype, place: torch.memory_format, recwarn: pytest.WarningsRecorder
) -> None:
    module = nn.Conv2d(2, 3, 2).to(dtype=dtype, memory_format=place)
    weights = Weights(module)
    vector = np.arange(weights.layout.size, dtype=np.float32)  # below 256, so bfloat16 has them exactly
    vector.flags.writeable = False
    weights.load(vector)
    np.testing.assert_array_equal(module.weight.detach().float().numpy(), weights.layout.split(vector)["weight"])
    np.testing.assert_array_equal(weights.read(), vector)
    assert not recwarn.list, "torch warns of arrays that it could write to, and must not"


@pytest.mark.slow
def test_a_model_is_set_without_a_copy_and_read_with_one(tmp_path: Path) -> None:
    weights = Weights(nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(4)))
    (tmp_path / "model").write_bytes(np.ones(weights.layout.size, dtype=np.float32).tobytes())
    received = map_file(tmp_path / "model", np.float32)
    with traced() as taken:
        weights.load(received)
    assert taken.peak < SPAN_BYTES, "what is looked at for values that are no numbers"
    with traced() as taken:
        model = weights.read()
    assert taken.peak < 1.1 * model.nbytes
    assert model.all()
