"""Model of named arrays of any numeric type for trainers whose model lives in user code; converts to a flat vector."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedsync.common.errors import ConfigError
from fedsync.model.layout import REAL_KINDS, Layout, Vector, as_type
from fedsync.model.tensor_parts import UNSAID, PartPatterns, TensorFacts, divide
from fedsync.train.module_parts import check_built, check_finite, frozen_digest
from fedsync.train.weights import say_rounded

Arrays = Mapping[str, NDArray[np.generic]]


class NamedArrays:
    """Named arrays of a model, with conversion to and from the flat vector that travels.

    Not to be confused with `fedsync.train.weights.Weights`, which holds the tensors of a module in training.
    Whole numbers are rounded to the nearest when a vector is loaded.

    Args:
        arrays: the first model.
        run: model parts that the strategy file names.
        tied: for each tied name, the name that owns the array; the tied one does not travel.
        gradients: whether a parameter has a gradient, by name; all names not listed are buffers.

    Raises `ConfigError` for no arrays, arrays of a type that cannot travel, or no such parts.
    """

    def __init__(
        self,
        arrays: Arrays,
        run: PartPatterns = UNSAID,
        tied: Mapping[str, str] | None = None,
        gradients: Mapping[str, bool] | None = None,
    ) -> None:
        odd = [f"{name} ({array.dtype})" for name, array in arrays.items() if array.dtype.kind not in REAL_KINDS]
        if odd or not arrays:
            problem = f"{', '.join(odd)}: no real numbers" if odd else "the model has no arrays"
            raise ConfigError("task.model", problem, "Give a model of real numbers")
        self._tied = tied or {}
        self._gradients = gradients or dict.fromkeys(arrays, True)
        places = {name: place for place, name in enumerate(arrays)}
        owners = {name: self._tied.get(name, name) for name in arrays}
        facts = {name: TensorFacts(places[owner], self._gradients.get(owner, True)) for name, owner in owners.items()}
        self.parts = divide(facts, run)
        self.layout = Layout.of({name: arrays[name] for name in self.parts.shared if name not in self._tied})
        check_finite({name: torch.from_numpy(np.asarray(arrays[name])) for name in self.layout.names})
        say_rounded(tuple(name for name in self.layout.names if arrays[name].dtype == np.float64))
        self.arrays: Arrays = arrays
        self._first = arrays

    @classmethod
    def of_module(cls, module: nn.Module, run: PartPatterns = UNSAID) -> NamedArrays:
        """Build from a module's state dict; raises `ConfigError` as the constructor, or if NumPy lacks a type."""
        owners: dict[int, str] = {}
        tied: dict[str, str] = {}
        arrays = {}
        gradients: dict[str, bool] = {}
        check_built(module)
        for name, tensor in module.state_dict(keep_vars=True).items():
            if isinstance(tensor, nn.Parameter):
                gradients[name] = tensor.requires_grad
            owner = owners.setdefault(id(tensor), name)
            if owner != name:
                tied[name] = owner
            try:
                arrays[name] = tensor.detach().cpu().numpy().copy()
            except TypeError as error:
                problem = f"{name} is {tensor.dtype}, which Flower cannot carry"
                raise ConfigError("task.model", problem, "Use float32") from error
        return cls(arrays, run, tied, gradients)

    @property
    def frozen_digest(self) -> bytes:
        return frozen_digest((name, torch.from_numpy(self._first[name])) for name in self.parts.frozen)

    @property
    def kept_names(self) -> tuple[str, ...]:
        return self.parts.kept

    @property
    def private(self) -> Arrays:
        return {name: self.arrays[name] for name in self.parts.private}

    def restore(self, private: Arrays) -> None:
        """Set private arrays to saved values, or to their first values where none are saved."""
        self.arrays = {**self.arrays, **{name: private.get(name, self._first[name]) for name in self.parts.private}}

    def load(self, vector: Vector) -> None:
        """Set every array that travels, float32 [layout.size]; ValueError for a wrong length or non-finite value."""
        self.layout.check(vector)
        parts = self.layout.split(vector.copy())  # not the caller's memory
        new = {name: as_type(parts[self._tied.get(name, name)], self.arrays[name].dtype) for name in self.parts.shared}
        self.arrays = {**self.arrays, **new}

    def take(self, arrays: Arrays, place: str) -> None:
        """Set every array to its value after training; frozen arrays may be missing.

        Raises `ConfigError` if an array is missing, a shape differs, or training changed a frozen parameter.
        """
        frozen = frozenset(self.parts.frozen)
        taken: dict[str, NDArray[np.generic]] = {}
        for name, old in self.arrays.items():
            new = arrays.get(name)
            if name in frozen:
                # Frozen buffers, such as a running mean, may change without training.
                if new is not None and name in self._gradients and not np.array_equal(new, old):
                    problem = f"training changed {name}, which is frozen and does not travel"
                    remedy = "Build it with a gradient, or name it below model.share or model.private"
                    raise ConfigError(place, problem, remedy)
                continue
            if new is None:
                known = ", ".join(list(arrays)[:4])
                raise ConfigError(place, f"its arrays ({known}, ...) lack {name}", "Reply with the whole model")
            if new.shape != old.shape:
                raise ConfigError(place, f"{name} has the shape {new.shape}, not {old.shape}", "Reply with the model")
            taken[name] = new.astype(old.dtype, copy=False)
        self.arrays = {**self.arrays, **taken}

    def read(self) -> Vector:
        return self.layout.join(self.arrays)

    def state(self) -> Mapping[str, torch.Tensor]:
        return {name: torch.from_numpy(array.copy()) for name, array in self.arrays.items()}
