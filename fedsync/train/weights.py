"""A model as the flat vector that travels, and back."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from fedsync.core.errors import ConfigError
from fedsync.core.layout import Layout, Vector
from fedsync.core.rng import Stream, derive_seed
from fedsync.tasks.protocol import Task
from fedsync.train.device import seeded


class Weights:
    """Reads and writes a module's parameters and persistent buffers as one float32 vector.

    Order and names are those of the module's state dict; a tensor that appears there twice (tied
    weights) travels once. Integer buffers are rounded to the nearest on the way in.

    Args:
        module: whose tensors these are. They may move to another device and back, as trainers of other libraries do.
        private: names of tensors that stay.

    Raises:
        ConfigError: the module has no tensors, or complex ones.
    """

    def __init__(self, module: nn.Module, private: Collection[str] = ()) -> None:
        self._module = module
        self._private = frozenset(private)
        named: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, tensor in module.state_dict(keep_vars=True).items():
            if id(tensor) not in seen and name not in private:
                seen.add(id(tensor))
                named[name] = tensor.detach()
        if not named or any(tensor.is_complex() for tensor in named.values()):
            raise ConfigError(
                "task.model", "the model has complex tensors, or none at all", "Return a module with real parameters"
            )
        self.layout = Layout(tuple(named), tuple(tuple(tensor.shape) for tensor in named.values()))
        tensors = list(named.values())
        # The vector on the device, cut to views once: an order then costs one small copy a tensor.
        self._flat = torch.empty(self.layout.size, dtype=torch.float32, device=tensors[0].device)
        parts = torch.split(self._flat, list(self.layout.sizes))
        self._parts = [part.view(tensor.shape) for tensor, part in zip(tensors, parts, strict=True)]

    def load(self, vector: Vector) -> None:
        """Set every tensor.

        Args:
            vector: float32 [layout.size].

        Raises:
            ValueError: the vector has another length, or a value that is not finite.
        """
        self.layout.check(vector)
        # torch warns of arrays that are read-only, as views of a message are.
        self._flat.copy_(torch.from_numpy(vector if vector.flags.writeable else vector.copy()))
        for tensor, part in zip(self._tensors(), self._parts, strict=True):
            tensor.copy_(part if tensor.is_floating_point() else part.round_())

    def read(self) -> Vector:
        """All tensors, float32 [layout.size], in memory of their own."""
        for tensor, part in zip(self._tensors(), self._parts, strict=True):
            part.copy_(tensor)
        return self._flat.to("cpu", copy=True).numpy()

    def state(self) -> dict[str, Tensor]:
        """The module's state dict without what stays; a tensor that travels once may be in it by several names."""
        state = self._module.state_dict()
        return {name: tensor for name, tensor in state.items() if name not in self._private}

    def _tensors(self) -> list[Tensor]:
        """What travels, as the module has it now, in the layout's order."""
        state = self._module.state_dict()
        return [state[name] for name in self.layout.names]


def build_model(task: Task, seed: int) -> nn.Module:
    """The task's module on the CPU, as every silo of a run with this seed builds it."""
    with seeded(torch.device("cpu"), derive_seed(seed, Stream.MODEL)):
        return task.model()


def initial_model(task: Task, seed: int) -> tuple[Vector, Layout]:
    """The model before any training, float32 [layout.size], and its layout; the same on every machine.

    Args:
        task: builds the module.
        seed: of the run.
    """
    weights = Weights(build_model(task, seed))
    return weights.read(), weights.layout


def model_digest(path: Path) -> str:
    """SHA-256, hexadecimal, of a model as it travels in the clear: float32, little-endian, in the state dict's order.

    Args:
        path: a state dict, as `save_model` writes it.

    Raises:
        ConfigError: it is none.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        tensors = {tensor.data_ptr(): tensor for tensor in state.values()}  # tied weights travel once
        parts = [tensor.detach().to(torch.float32).contiguous().numpy().astype("<f4") for tensor in tensors.values()]
    except Exception as error:  # a file that is no state dict can fail in any way
        raise ConfigError(str(path), "not a state dict that torch.load reads", "Name a model.pt") from error
    return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()


class TaskModel:
    """The model of a task whose data need not be here.

    Args:
        task: builds the module.
        seed: of the run.
    """

    def __init__(self, task: Task, seed: int) -> None:
        self._task = task
        self.layout = initial_model(task, seed)[1]

    def save_model(self, path: Path, model: Vector) -> None:
        """See `save_model`."""
        save_model(path, self._task, model)


def save_model(path: Path, task: Task, vector: Vector) -> None:
    """Write a model's state dict, as ``torch.load(path, weights_only=True)`` reads it; whole or not at all.

    Args:
        path: file to write.
        task: builds the module.
        vector: float32 [layout.size].

    Raises:
        ValueError: the vector has the wrong length or is not finite.
    """
    # Any seed will do: every value is overwritten.
    module = build_model(task, 0)
    Weights(module).load(vector)
    save_state(path, module.state_dict())


def save_tensors(path: Path, tensors: Mapping[str, Vector]) -> None:
    """Write named float32 tensors as a state dict, where there is no module to ask for their types."""
    save_state(path, {name: torch.from_numpy(values.copy()) for name, values in tensors.items()})


def save_state(path: Path, state: Mapping[str, Tensor]) -> None:
    """Write a state dict as ``torch.load(path, weights_only=True)`` reads it; whole or not at all."""
    unfinished = path.with_suffix(".tmp")
    torch.save(state, unfinished)
    unfinished.replace(path)
