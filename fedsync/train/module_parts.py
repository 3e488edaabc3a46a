"""Parts of a PyTorch module: shared tensors (sent to the server), private tensors and frozen tensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedsync.common.errors import ConfigError, Diverged
from fedsync.model.tensor_parts import UNSAID, PartPatterns, Parts, TensorFacts, divide

KEEP_OUT = "Keep it out of the state dict, as register_buffer(..., persistent=False) does"

_SPAN = 2**20
"""Values of a tensor that are hashed at a time, because the tensor may be on a GPU."""


def parts_of(module: nn.Module, run: PartPatterns, own: PartPatterns = UNSAID, place: str = "task, parts()") -> Parts:
    """Divide a module as in `divide`; `ConfigError` also if a state is no plain tensor, or a shared one not finite."""
    check_built(module)
    state = module.state_dict(keep_vars=True)
    trained = {name: not isinstance(each, nn.Parameter) or each.requires_grad for name, each in state.items()}
    facts = {name: TensorFacts(id(tensor), trained[name]) for name, tensor in state.items()}
    parts = divide(facts, run, own, place)
    check_finite({name: state[name] for name in parts.shared})
    return parts


def check_built(module: nn.Module) -> None:
    for name, tensor in module.state_dict(keep_vars=True).items():
        if is_lazy(tensor):
            remedy = "Build layers with their sizes, as nn.Linear(16, 2), not LazyLinear"
            problem = f"{name} has no shape before the model's first batch, so silos cannot agree on one"
            raise ConfigError("task.model", problem, remedy)
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or tensor.is_quantized:
            problem = f"{name} is no plain tensor, such as an extra state or a sparse buffer, and cannot travel"
            raise ConfigError("task.model", problem, KEEP_OUT)


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor.detach()).all()):
            problem = f"the first model's {name} has values that are not finite, such as -inf, and these cannot travel"
            raise ConfigError("task.model", problem, f"{KEEP_OUT}; or use -1e9")


class FrozenTensors:
    """Tensors that stay as they were built or loaded; frozen parameters lose their gradient here. A forward pass may
    change buffers, such as running means; every order starts with their original values.
    """

    def __init__(self, module: nn.Module, names: Collection[str]) -> None:
        self._module = module
        state = module.state_dict(keep_vars=True)
        self._parameters = [name for name in names if isinstance(state[name], nn.Parameter)]
        for name in self._parameters:
            state[name].requires_grad_(False)
        self._buffers = {name: state[name].detach().clone() for name in names if name not in self._parameters}
        self._digests = {name: _digest(name, state[name]) for name in names}
        self._marks = {name: _mark(state[name]) for name in self._parameters}
        self.digest = _digest_of_all(self._digests.values())

    def restore(self) -> None:
        """Set buffers to their first values; `ConfigError`, as `check`, if an earlier order changed a parameter."""
        self.check()
        if self._buffers:
            state = self._module.state_dict()
            for name, kept in self._buffers.items():
                state[name].copy_(kept)

    def check(self) -> None:
        """Raise `ConfigError` if training changed a frozen parameter; reads only tensors that were written to."""
        state = self._module.state_dict(keep_vars=True) if self._parameters else {}
        for name in self._parameters:
            if (mark := _mark(state[name])) == self._marks[name]:
                continue
            if _digest(name, state[name]) != self._digests[name]:
                problem = f"training changed {name}, which is frozen and does not travel"
                raise ConfigError("model.share", problem, "Build it with a gradient, or name it under share or private")
            self._marks[name] = mark


class ModelParts:
    """Private and frozen parts of a trainer's module."""

    def __init__(self, module: nn.Module, parts: Parts) -> None:
        self.shared, self.kept_names, self.frozen = parts.shared, parts.kept, frozenset(parts.frozen)
        self.private_names = parts.private
        self._private = PrivateParts(module, parts.private)
        self._frozen = FrozenTensors(module, parts.frozen)
        self.plain = not (parts.private or parts.frozen)
        """Whether all tensors travel, so that nothing needs to be kept or restored."""
        self.frozen_digest = self._frozen.digest

    def restore(self, kept: bytes = b"") -> None:
        self._private.restore(kept)
        self._frozen.restore()

    def keep(self) -> bytes:
        """Serialise private tensors after an order; raises as `PrivateParts.keep` and `FrozenTensors.check`."""
        self._frozen.check()
        return self._private.keep()


def frozen_digest(tensors: Iterable[tuple[str, Tensor]]) -> bytes:
    """SHA-256 of names, types, shapes and values of tensors; empty without tensors."""
    return _digest_of_all(_digest(name, tensor) for name, tensor in tensors)


def _digest_of_all(digests: Iterable[bytes]) -> bytes:
    whole = b"".join(digests)
    return hashlib.sha256(whole).digest() if whole else b""


def _mark(tensor: Tensor) -> tuple[int, int]:
    """Cheap mark of a tensor that changes when the tensor is written to or replaced."""
    return tensor.data_ptr(), tensor._version


def _digest(name: str, tensor: Tensor) -> bytes:
    found = hashlib.sha256(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
    for span in torch.split(tensor.detach().reshape(-1), _SPAN):
        found.update(span.cpu().view(torch.uint8).numpy().data)
    return found.digest()


MOST_BYTES = 2**28
"""Size limit of stored private parts; every order writes them to disk."""

_PLACE = "private parts"


class PrivateParts:
    """Private parameters and persistent buffers, stored as bytes between orders if training changed them."""

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        self._module = module
        self.names = names
        state = module.state_dict()
        self._initial = {name: _raw(state[name]).clone() for name in names}

    def keep(self) -> bytes:
        """Serialise the current values: a line of JSON with names, types and shapes, then all values in order. Raises
        `Diverged` if a value is not finite, and `ConfigError` if the values exceed `MOST_BYTES`.
        """
        if not self.names:  # most models; saves the time of building the state dict
            return b""
        changed, size = dict[str, Tensor](), 0
        state = self._module.state_dict()
        for name in self.names:
            tensor, raw = state[name], _raw(state[name])
            if torch.equal(raw, self._initial[name]):
                continue
            if not torch.isfinite(tensor).all():
                raise Diverged(name, "training diverged: a private part has values that are not finite", "Train slower")
            changed[name] = tensor
            size += len(raw)
        if size > MOST_BYTES:
            problem = f"what training changed in private parts takes {size} bytes, at most {MOST_BYTES}"
            raise ConfigError(_PLACE, problem, "Freeze some of it, or keep less private")
        return packed(changed)

    def restore(self, kept: bytes) -> None:
        """Set values from `keep`, or initial values where none are stored; `ConfigError` if private parts changed."""
        if not self.names and not kept:
            return
        text, _, values = kept.partition(b"\n")
        state, found, position = self._module.state_dict(), dict(self._initial), 0
        data = torch.frombuffer(bytearray(values), dtype=torch.uint8) if values else torch.empty(0, dtype=torch.uint8)
        for entry in json.loads(text or b"[]"):
            name = entry[0]
            if name not in found or _about(name, state[name]) != entry:
                problem = f"{name} is stored as {entry[1]} {entry[2]}, which the model does not have"
                raise ConfigError(_PLACE, problem, "Give the model that the run began with, or begin another run")
            length = len(found[name])
            found[name] = data[position : position + length]
            position += length
        for name, raw in found.items():
            state[name].copy_(raw.clone().view(state[name].dtype).view(state[name].shape))


def packed(tensors: Mapping[str, Tensor]) -> bytes:
    """Serialise private tensors as `PrivateParts.restore` reads them; empty without tensors."""
    about = [_about(name, tensor) for name, tensor in tensors.items()]
    head = [json.dumps(about, separators=(",", ":")).encode() + b"\n"] if about else []
    return b"".join([*head, *(_raw(tensor).numpy().tobytes() for tensor in tensors.values())])


def _about(name: str, tensor: Tensor) -> list[object]:
    return [name, str(tensor.dtype), list(tensor.shape)]


def _raw(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
