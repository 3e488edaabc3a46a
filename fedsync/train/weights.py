"""Conversion between a PyTorch module and the flat vector that is sent."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsync.common import foreign
from fedsync.common.errors import ConfigError, RunError
from fedsync.common.files import written_atomically
from fedsync.common.rng import Stream, derive_seed
from fedsync.model.chunked_arrays import give_back, spans
from fedsync.model.layout import Layout, Vector
from fedsync.model.tensor_parts import UNSAID, PartPatterns, PartsError
from fedsync.tasks.task_protocol import Task
from fedsync.train.machine.device import seeded
from fedsync.train.machine.resources import FittingModel
from fedsync.train.module_parts import KEEP_OUT, PrivateParts, frozen_digest, parts_of
from fedsync.train.silo_trainer import TensorPlace, TrainerFacts

logger = foreign.logger(__name__)

_SAME_TASK = "Name a model of the same task"


def rounded(tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Names of tensors of float64, and of integers that float32 changes."""
    return tuple(
        name
        for name, tensor in tensors.items()
        if tensor.dtype == torch.float64
        or not (tensor.is_floating_point() or torch.equal(tensor.float().to(tensor.dtype), tensor))
    )


@cache
def say_rounded(names: tuple[str, ...]) -> None:
    if names:
        some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        problem = "float64 and large integers in the model travel as float32, with 7 digits (16777217 as 16777216): %s"
        logger.warning(problem, some)


class Weights:
    """Parameters and persistent buffers of a module, as one float32 vector of the tensors ``names``, None for all.

    Order and names follow the module's state dict; a tensor with two names (tied weights) travels once. Integer buffers
    are rounded to the nearest when a vector is loaded. Tensors may move between devices. Raises `ConfigError` if the
    module has no tensors, or complex tensors, or if its state dict lacks a trained parameter.
    """

    def __init__(self, module: nn.Module, names: Collection[str] | None = None) -> None:
        self._module = module
        state, first = module.state_dict(keep_vars=True), dict[int, str]()
        owners = {name: first.setdefault(id(state[name]), name) for name in state if names is None or name in names}
        named: dict[str, Tensor] = {name: state[name] for name, owner in owners.items() if owner == name}
        self.ties: Mapping[str, str] = {name: owner for name, owner in owners.items() if owner != name}
        if not named or any(tensor.is_complex() for tensor in named.values()):
            problem = "the model has complex tensors, or none at all"
            raise ConfigError("task.model", problem, "Return a module with real parameters")
        known = {tensor.data_ptr() for tensor in state.values()}
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and parameter.data_ptr() not in known:
                problem = f"the model trains {name}, and its state_dict() leaves it out or copies it"
                raise ConfigError("task.model", problem, "Return the parameter itself")
        trained = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
        buffers = tuple(name for name, tensor in named.items() if tensor.untyped_storage().data_ptr() not in trained)
        shapes = tuple(tuple(tensor.shape) for tensor in named.values())
        self.layout = Layout(tuple(named), shapes, buffers if len(buffers) < len(named) else ())
        self.rounds = any(tensor.dtype in (torch.bfloat16, torch.float16) for tensor in named.values())
        say_rounded(rounded(named))
        # Names are attribute paths in the module, unless the module overrides its state dict.
        self._paths = [attrgetter(name) for name in named]
        try:
            self._by_path = all(path(module) is each for path, each in zip(self._paths, named.values(), strict=True))
        except AttributeError:
            self._by_path = False
        tensors = [tensor.detach() for tensor in named.values()]
        # A vector on the device, cut to views once, so that an order costs one small copy per tensor; not for a CPU.
        self._flat: Tensor | None = None
        if tensors[0].device.type != "cpu":
            self._flat = torch.empty(self.layout.size, dtype=torch.float32, device=tensors[0].device)
            parts = torch.split(self._flat, list(self.layout.sizes))
            self._parts = [part.view(tensor.shape) for tensor, part in zip(tensors, parts, strict=True)]

    def load(self, vector: Vector) -> None:
        """Set every tensor from float32 [layout.size]; ValueError for a wrong length or a value that is not finite."""
        self.layout.check(vector)
        # torch warns about read-only arrays, such as a received model, so parts of it are copied.
        tensors = self._tensors()
        if self._flat is None:
            for tensor, values in zip(tensors, self.layout.split(vector).values(), strict=True):
                if tensor.dtype == torch.float32 and tensor.device.type == "cpu":
                    np.copyto(tensor.numpy(), values)
                else:
                    _set(tensor, torch.from_numpy(values.copy()))
                give_back(vector)
        else:
            for start, stop in spans(vector.size, vector.itemsize):
                self._flat[start:stop].copy_(torch.from_numpy(vector[start:stop].copy()))
                give_back(vector)
            for tensor, part in zip(tensors, self._parts, strict=True):
                _set(tensor, part)
        for name, tensor in zip(self.layout.names, tensors, strict=True):
            if name.endswith(("running_var", "moving_variance")):
                tensor.clamp_(min=0)  # stale updates can add up to less in encrypted sums, and its root would be NaN

    def read(self) -> Vector:
        if self._flat is not None:
            for tensor, part in zip(self._tensors(), self._parts, strict=True):
                part.copy_(tensor)
            return self._flat.to("cpu", copy=True).numpy()
        vector = np.empty(self.layout.size, np.float32)
        for tensor, values in zip(self._tensors(), self.layout.split(vector).values(), strict=True):
            torch.from_numpy(values).copy_(tensor)
        return vector

    def state(self) -> dict[str, Tensor]:
        return self._module.state_dict()

    def _tensors(self) -> list[Tensor]:
        state, tensors = None if self._by_path else self._module.state_dict(), list[Tensor]()
        for path, name, shape in zip(self._paths, self.layout.names, self.layout.shapes, strict=True):
            tensors.append(path(self._module).detach() if state is None else state[name])
            if tensors[-1].shape != shape:
                problem = f"training changed the shape of {name} from {list(shape)} to {list(tensors[-1].shape)}"
                raise ConfigError("task.model", problem, KEEP_OUT)
        return tensors


def _set(tensor: Tensor, values: Tensor) -> None:
    tensor.copy_(values if tensor.is_floating_point() else values.round_())


def build_model(task: Task, seed: int) -> nn.Module:
    """Build the task's module on the CPU, equal for all silos with this seed; `ConfigError` if memory is too small."""
    with seeded(torch.device("cpu"), derive_seed(seed, Stream.MODEL)), FittingModel():
        return task.model()


def model_digest(path: Path) -> str:
    """SHA-256, hexadecimal, of a state dict's tensors: float32, little-endian, in its order; tied weights only once."""
    tensors = {tensor.data_ptr(): tensor for tensor in read_state(path).values()}  # tied weights travel once
    hashed = hashlib.sha256()
    for tensor in tensors.values():
        hashed.update(tensor.to(torch.float32).contiguous().numpy().astype("<f4", copy=False).data)
    return hashed.hexdigest()


def read_state(path: Path) -> dict[str, Tensor]:
    """Read the tensors in a file by name, on the CPU; raises `ConfigError` if the file is not a state dict."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        return {str(name): tensor.detach() for name, tensor in state.items()}
    except FileNotFoundError as error:
        raise ConfigError(str(path), "there is no such file", "Name a model.pt") from error
    except Exception as error:  # a file that is no state dict can fail in any way
        raise ConfigError(str(path), "not a state dict that torch.load reads", "Name a model.pt") from error


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Read a state dict as `read_state`, but as NumPy arrays; bfloat16 becomes float32."""
    return {key: (one.float() if one.dtype == torch.bfloat16 else one).numpy() for key, one in read_state(path).items()}


def load_model(path: Path, layout: Layout, known: Collection[str], frozen: Sequence[str] = (), sha: str = "") -> Vector:
    """Load the shared part of a model from a file, float32 [layout.size]; tensors are matched by name. ``known`` names
    all tensors of the model. Raises `ConfigError` if the file is no state dict, or does not fit, and as `check_frozen`.
    """
    state = read_state(path)
    check_frozen(str(path), state, frozen, sha)
    arrays = {name: tensor.to(torch.float32).numpy() for name, tensor in state.items()}
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        if name not in arrays:
            raise ConfigError(str(path), f"the tensor {name!r} is missing", _SAME_TASK)
        if arrays[name].shape != shape:
            found = f"the tensor {name!r} has the shape {list(arrays[name].shape)}, the task's {list(shape)}"
            raise ConfigError(str(path), found, _SAME_TASK)
        if not np.isfinite(arrays[name]).all():
            raise ConfigError(str(path), f"the tensor {name!r} has values that are not finite", _SAME_TASK)
    strange = arrays.keys() - set(known)
    if strange:
        raise ConfigError(str(path), f"the tensor {min(strange)!r} is not in the task's model", _SAME_TASK)
    return layout.join(arrays)


def load_for(facts: TrainerFacts, path: Path) -> Vector:
    """Load a model for a trainer; raises as `load_model`."""
    return load_model(path, facts.layout, facts.names, facts.kept_names[len(facts.private_names) :], facts.frozen)


def check_frozen(model: str, state: Mapping[str, Tensor], names: Sequence[str], digest: str) -> None:
    """Raise `PartsError` if a model has frozen tensors ``names`` with another digest: no silo loads them. The file of a
    server that could not build the model lacks them.
    """
    if state.keys() >= set(names) and frozen_digest((name, state[name]) for name in names).hex() != digest:
        problem = f"{names[0]!r}, or another frozen tensor, differs from the task's, and frozen tensors do not travel"
        raise PartsError(model, problem, "Load them in the task's model(), or let them travel: model.share")


def values_of(state: Mapping[str, Tensor]) -> tuple[tuple[TensorPlace, ...], bytes]:
    """Return the places of tensors, and their values in memory layout, for `save_values` in another process."""
    places, starts, pieces, end = list[TensorPlace](), dict[object, int](), list[bytes](), 0
    for name, tensor in state.items():
        one = tensor.data_ptr(), tensor.dtype, tensor.shape
        if one not in starts or not tensor.numel():
            starts[one] = end
            pieces.append(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
            end += len(pieces[-1])
        kind = str(tensor.dtype).removeprefix("torch.")
        places.append(TensorPlace(name, kind, tuple(tensor.shape), starts[one]))
    return tuple(places), b"".join(pieces)


def save_values(path: Path, places: Sequence[TensorPlace], values: NDArray[np.uint8], mode: int) -> None:
    """Write a state dict from untrusted places and values as `save_state`; raise `RunError` if they are no tensors."""
    found, state = dict[object, Tensor](), dict[str, Tensor]()
    for each in places:
        dtype, shape = getattr(torch, each.dtype, None), each.shape
        if not isinstance(dtype, torch.dtype) or min(shape, default=0) < 0:
            raise RunError(f"{each.name!r} is no tensor")
        end = each.start + prod(shape) * dtype.itemsize
        if not 0 <= each.start <= end <= len(values):
            raise RunError(f"the values of {each.name!r} are missing")
        one = each.start, dtype, shape
        if one not in found:  # tied tensors are one
            found[one] = torch.empty(shape, dtype=dtype)
            found[one].view(-1).view(torch.uint8).numpy()[:] = values[each.start : end]
        state[each.name] = found[one]
    save_state(path, state, mode)


class TaskModel:
    """Model of a task, without the task's data; raises `ConfigError` if it has no parts as ``run`` names them."""

    def __init__(self, task: Task, seed: int, run: PartPatterns = UNSAID) -> None:
        self._module = build_model(task, seed)
        self.parts = parts_of(self._module, run, task.parts())
        self._weights = Weights(self._module, self.parts.shared)
        self.layout, self.ties = self._weights.layout, self._weights.ties

    def initial(self) -> Vector:
        """Shared part of the untrained model, float32 [layout.size]."""
        return self._weights.read()

    @property
    def frozen_digest(self) -> bytes:
        state = self._module.state_dict()
        return frozen_digest((name, state[name]) for name in self.parts.frozen)

    def check_frozen(self, first: Mapping[str, Any], digest: str) -> None:
        """Compare frozen tensors of a run's first model, Flower's arrays, with this model's ``digest``."""
        own, names = self._module.state_dict(), self.parts.frozen
        given = {name: torch.from_numpy(first[name].numpy()).to(own[name].dtype) for name in names if name in first}
        check_frozen("initial_model", given, names, digest)

    def save_model(self, path: Path, model: Vector, private: bytes = b"") -> None:
        """Write a model's state dict atomically; errors as `Weights.load` and `PrivateParts.restore`.

        ``model`` is the shared part, float32 [layout.size]; ``private`` has private parts from `PrivateParts.keep`.
        Other tensors are as the task builds them.
        """
        self._weights.load(model)
        PrivateParts(self._module, self.parts.private).restore(private)
        save_state(path, self._module.state_dict())


def save_tensors(path: Path, tensors: Mapping[str, Vector]) -> None:
    """Write named float32 tensors as a state dict, for models without a module in this process."""
    save_state(path, {name: torch.from_numpy(values.copy()) for name, values in tensors.items()})


def save_state(path: Path, state: Mapping[str, Tensor], mode: int | None = None) -> None:
    """Write a state dict atomically, as ``torch.load(path, weights_only=True)`` reads it on any machine. ``mode`` is
    the file's, None for the default; `ConfigError` if the file cannot be written.
    """
    # A file of a GPU's tensors needs a GPU to load. Tied tensors stay one.
    moved, on_cpu = dict[object, Tensor](), dict[str, Tensor]()
    for name, tensor in state.items():
        one = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        if one not in moved:
            moved[one] = tensor.cpu()
        on_cpu[name] = moved[one]
    with written_atomically(path, mode) as file:
        torch.save(on_cpu, file)
