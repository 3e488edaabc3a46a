"""Parts of a module: which of its tensors travel, what is kept of those that stay, and that nobody changes the rest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedsync.common.errors import ConfigError
from fedsync.model.tensor_parts import UNSAID, PartPatterns, Parts, TensorFacts, divide
from fedsync.train.private import PrivateParts

_SPAN = 2**20
"""Values of a tensor that are read at a time where it is not in this machine's memory."""


def parts_of(module: nn.Module, run: PartPatterns, own: PartPatterns = UNSAID, place: str = "task, parts()") -> Parts:
    """The parts of a module; arguments and errors as of `fedsync.model.tensor_parts.divide`.

    Raises:
        ConfigError: also where a tensor has no shape yet, or is to travel and is not finite.
    """
    check_built(module)
    state = module.state_dict(keep_vars=True)
    facts = {name: TensorFacts(id(tensor), _trained(tensor)) for name, tensor in state.items()}
    parts = divide(facts, run, own, place)
    check_finite({name: state[name] for name in parts.shared})
    return parts


def check_built(module: nn.Module) -> None:
    """See that all tensors of a model have a shape.

    Raises:
        ConfigError: one of a lazy layer has none yet; names it.
    """
    lazy = next((name for name, tensor in module.state_dict(keep_vars=True).items() if is_lazy(tensor)), None)
    if lazy is not None:
        problem = f"{lazy} has no shape before the model's first batch, so silos cannot agree on one"
        raise ConfigError("task.model", problem, "Build layers with their sizes, as nn.Linear(16, 2), not LazyLinear")


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """See that tensors can travel, float32.

    Raises:
        ConfigError: one is not finite; names it.
    """
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor.detach()).all()):
            problem = f"the first model's {name} has values that are not finite, such as -inf, and these cannot travel"
            remedy = "Keep a constant out of the state dict: register_buffer(..., persistent=False); or use -1e9"
            raise ConfigError("task.model", problem, remedy)


def _trained(tensor: Tensor) -> bool:
    return not isinstance(tensor, nn.Parameter) or tensor.requires_grad


class FrozenTensors:
    """Tensors that stay as they were built or loaded. Nothing of them is copied, buffers apart.

    Parameters lose their gradient here. Buffers, such as running means, may be changed by a forward pass, and every
    order begins with them as they were.

    Args:
        module: whose tensors they are, before any training.
        names: theirs.
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

    @property
    def digest(self) -> bytes:
        """SHA-256 over names, types, shapes and values; empty where nothing is frozen."""
        return _digest_of_all(self._digests.values())

    def restore(self) -> None:
        """Set the buffers to what they were."""
        if self._buffers:
            state = self._module.state_dict()
            for name, kept in self._buffers.items():
                state[name].copy_(kept)

    def check(self) -> None:
        """See that training left the parameters alone: only what was written to is read again.

        Raises:
            ConfigError: it changed one.
        """
        state = self._module.state_dict(keep_vars=True) if self._parameters else {}
        for name in self._parameters:
            if (mark := _mark(state[name])) == self._marks[name]:
                continue
            if _digest(name, state[name]) != self._digests[name]:
                problem = f"training changed {name}, which is frozen and does not travel"
                raise ConfigError("model.share", problem, "Build it with a gradient, or name it under share or private")
            self._marks[name] = mark


class ModelParts:
    """What a trainer does with the parts of its module that do not travel.

    Args:
        module: the model, before any training.
        parts: of it.
    """

    def __init__(self, module: nn.Module, parts: Parts) -> None:
        self.shared, self.kept_names = parts.shared, parts.kept
        self._private = PrivateParts(module, parts.private)
        self._frozen = FrozenTensors(module, parts.frozen)
        self.plain = not (parts.private or parts.frozen)
        """Everything travels, so there is nothing to do."""

    @property
    def frozen_digest(self) -> bytes:
        return self._frozen.digest

    def restore(self, kept: bytes = b"") -> None:
        """Begin an order, or an evaluation: private tensors as ``kept`` says, frozen ones as they were built."""
        self._private.restore(kept)
        self._frozen.restore()

    def keep(self) -> bytes:
        """What is kept of private tensors after an order; raises as `PrivateParts.keep` and `FrozenTensors.check`."""
        self._frozen.check()
        return self._private.keep()


def frozen_digest(tensors: Iterable[tuple[str, Tensor]]) -> bytes:
    """SHA-256 over names, types, shapes and values of tensors; empty where there are none."""
    return _digest_of_all(_digest(name, tensor) for name, tensor in tensors)


def _digest_of_all(digests: Iterable[bytes]) -> bytes:
    whole = b"".join(digests)
    return hashlib.sha256(whole).digest() if whole else b""


def _mark(tensor: Tensor) -> tuple[int, int]:
    """Changes when the tensor is written to or replaced."""
    return tensor.data_ptr(), tensor._version


def _digest(name: str, tensor: Tensor) -> bytes:
    found = hashlib.sha256(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
    for span in torch.split(tensor.detach().reshape(-1), _SPAN):
        found.update(span.cpu().view(torch.uint8).numpy().data)
    return found.digest()
