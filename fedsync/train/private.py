"""Parts of a model that stay at its silo: no part of what travels, and whole again after a restart."""

from __future__ import annotations

import json
from collections.abc import Collection

import torch
from torch import Tensor, nn

from fedsync.core.errors import ConfigError, Diverged

MOST_BYTES = 2**28
"""What may be kept of private parts; every order writes it to disk."""

_PLACE = "silo.use, private"


class PrivateParts:
    """Parameters and persistent buffers that stay, kept as bytes from one order to the next.

    What training never changes, such as a frozen body, is as setup made it and not kept.

    Args:
        module: the model.
        prefixes: how the names of its tensors that stay begin.

    Raises:
        ConfigError: no name begins so, every name does, or a tensor both stays and travels.
    """

    def __init__(self, module: nn.Module, prefixes: Collection[str]) -> None:
        self._module = module
        state = module.state_dict(keep_vars=True)
        for prefix in prefixes:
            if not any(name.startswith(prefix) for name in state):
                problem = f"no tensor's name begins with {prefix!r}"
                raise ConfigError(_PLACE, problem, f"Names are {', '.join(state)}"[:400])
        self.names = tuple(name for name in state if name.startswith(tuple(prefixes)))
        if prefixes and len(self.names) == len(state):
            raise ConfigError(_PLACE, "the whole model stays, nothing travels", "Name fewer parts")
        travelling = {id(tensor): name for name, tensor in state.items() if name not in self.names}
        for name in self.names:
            if other := travelling.get(id(state[name])):
                raise ConfigError(_PLACE, f"{name} is tied to {other}, which travels", "Name both, or neither")
        self._initial = {name: _raw(state[name]).clone() for name in self.names}

    def keep(self) -> bytes:
        """The parts as they are now: names, types and shapes in a line of JSON, then the values of one after another.

        Raises:
            Diverged: a value is not finite.
            ConfigError: they are more than `MOST_BYTES`.
        """
        about, parts = [], []
        state = self._module.state_dict()
        for name in self.names:
            tensor, raw = state[name], _raw(state[name])
            if torch.equal(raw, self._initial[name]):
                continue
            if not torch.isfinite(tensor).all():
                raise Diverged(name, "training diverged: a private part has values that are not finite", "Train slower")
            about.append(_about(name, tensor))
            parts.append(raw.numpy().tobytes())
        if not about:
            return b""
        size = sum(map(len, parts))
        if size > MOST_BYTES:
            problem = f"what training changed in private parts takes {size} bytes, at most {MOST_BYTES}"
            raise ConfigError(_PLACE, problem, "Freeze some of it, or keep less private")
        return b"".join([json.dumps(about, separators=(",", ":")).encode() + b"\n", *parts])

    def restore(self, kept: bytes) -> None:
        """Set the parts to what `keep` gave; to what they were at first, where nothing is kept.

        Raises:
            ConfigError: the model has other private parts now.
        """
        text, _, values = kept.partition(b"\n")
        state, found, position = self._module.state_dict(), dict(self._initial), 0
        data = torch.frombuffer(bytearray(values), dtype=torch.uint8) if values else torch.empty(0, dtype=torch.uint8)
        for entry in json.loads(text or b"[]"):
            name = entry[0]
            if name not in found or _about(name, state[name]) != entry:
                problem = f"{name} of the orders before was {entry[1]} {entry[2]}, which the model does not have"
                raise ConfigError(_PLACE, problem, "Give the model that the run began with, or begin another run")
            length = len(found[name])
            found[name] = data[position : position + length]
            position += length
        for name, raw in found.items():
            state[name].copy_(raw.clone().view(state[name].dtype).view(state[name].shape))


def _about(name: str, tensor: Tensor) -> list[object]:
    return [name, str(tensor.dtype), list(tensor.shape)]


def _raw(tensor: Tensor) -> Tensor:
    """A tensor's bytes, uint8 [bytes], on the CPU."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
