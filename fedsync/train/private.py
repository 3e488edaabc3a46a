"""Private parts of a model, which stay at their silo and are stored between orders and restarts."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedsync.common.errors import ConfigError, Diverged

MOST_BYTES = 2**28
"""Size limit of stored private parts; every order writes them to disk."""

_PLACE = "private parts"


class PrivateParts:
    """Private parameters and persistent buffers, stored as bytes between orders.

    Tensors that training never changed are not stored: they are rebuilt with the model.
    """

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        self._module = module
        self.names = names
        state = module.state_dict()
        self._initial = {name: _raw(state[name]).clone() for name in names}

    def keep(self) -> bytes:
        """Serialise the current values: a line of JSON with names, types and shapes, then all values in order.

        Raises:
            Diverged: a value is not finite.
            ConfigError: the values exceed `MOST_BYTES`.
        """
        if not self.names:  # most models; saves the time of building the state dict
            return b""
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
        """Set values from `keep`, or initial values where none are stored; `ConfigError` if private parts changed."""
        if not self.names and not kept:
            return
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
    """Bytes of a tensor, uint8 [bytes], on the CPU."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
