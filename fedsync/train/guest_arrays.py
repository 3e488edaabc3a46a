"""A model that is arrays by name, of whatever types, as the flat vector that travels; for code that keeps the model."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedsync.core.errors import ConfigError
from fedsync.core.layout import REAL_KINDS, Layout, Vector, as_type

Arrays = Mapping[str, NDArray[np.generic]]


class NamedArrays:
    """Not to be confused with `fedsync.train.weights.Weights`, whose tensors are those of a module that trains.

    Whole numbers are rounded to the nearest on the way in. A name that stands for another's array (tied weights) does
    not travel, and has the other's values.

    Args:
        arrays: the first model.
        tied: names of such, and whose array they have.

    Raises:
        ConfigError: there are none, or some that cannot travel.
    """

    def __init__(self, arrays: Arrays, tied: Mapping[str, str] | None = None) -> None:
        odd = [f"{name} ({array.dtype})" for name, array in arrays.items() if array.dtype.kind not in REAL_KINDS]
        if odd or not arrays:
            problem = f"{', '.join(odd)}: no real numbers" if odd else "the model has no arrays"
            raise ConfigError("task.model", problem, "Give a model of real numbers")
        self._tied = tied or {}
        self.layout = Layout.of({name: array for name, array in arrays.items() if name not in self._tied})
        self.arrays: Arrays = arrays

    @classmethod
    def of_module(cls, module: nn.Module) -> NamedArrays:
        """Of a module's state dict; raises `ConfigError` where NumPy has no such type."""
        owners: dict[int, str] = {}
        tied: dict[str, str] = {}
        arrays = {}
        for name, tensor in module.state_dict(keep_vars=True).items():
            owner = owners.setdefault(id(tensor), name)
            if owner != name:
                tied[name] = owner
            try:
                arrays[name] = tensor.detach().cpu().numpy().copy()
            except TypeError as error:
                problem = f"{name} is {tensor.dtype}, which Flower cannot carry"
                raise ConfigError("task.model", problem, "Use float32") from error
        return cls(arrays, tied)

    def load(self, vector: Vector) -> None:
        """Set every array.

        Args:
            vector: float32 [layout.size].

        Raises:
            ValueError: it has another length, or a value that is not finite.
        """
        self.layout.check(vector)
        parts = self.layout.split(vector.copy())  # not the caller's memory
        self.arrays = {name: as_type(parts[self._tied.get(name, name)], old.dtype) for name, old in self.arrays.items()}

    def take(self, arrays: Arrays, place: str) -> None:
        """Set every array to what training made of it.

        Raises:
            ConfigError: names or shapes are others; says which.
        """
        for name, old in self.arrays.items():
            new = arrays.get(name)
            if new is None:
                known = ", ".join(list(arrays)[:4])
                raise ConfigError(place, f"its arrays ({known}, ...) lack {name}", "Reply with the whole model")
            if new.shape != old.shape:
                raise ConfigError(place, f"{name} has the shape {new.shape}, not {old.shape}", "Reply with the model")
        self.arrays = {name: arrays[name].astype(old.dtype, copy=False) for name, old in self.arrays.items()}

    def read(self) -> Vector:
        """All arrays, float32 [layout.size], in memory of their own."""
        return self.layout.join(self.arrays)

    def state(self) -> Mapping[str, torch.Tensor]:
        """As a state dict."""
        return {name: torch.from_numpy(array.copy()) for name, array in self.arrays.items()}
