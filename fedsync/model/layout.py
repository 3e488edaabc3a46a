"""Conversion of a model's named tensors to one flat float32 vector, and back."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsync.common.errors import ProtocolError
from fedsync.model.chunked_arrays import give_back, spans

Vector = NDArray[np.float32]

REAL_KINDS = "fiub"
"""NumPy kinds that can travel as float32: floats, integers and booleans."""


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


@dataclass(frozen=True, slots=True)
class Layout:
    """Names and shapes of a model's tensors, in the order of the flat vector. All data between silos and server is
    float32; the trainer rounds integer buffers (batch-norm counters) back. ``buffers`` names tensors beside parameters,
    as far as they are known: those of a module, but not those of named arrays.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    buffers: tuple[str, ...] = ()

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[np.generic]]) -> Layout:
        return cls(tuple(arrays), tuple(tuple(array.shape) for array in arrays.values()))

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(math.prod(shape) for shape in self.shapes)

    @property
    def size(self) -> int:
        return sum(self.sizes)

    @property
    def nbytes(self) -> int:
        return 4 * self.size

    def check(self, vector: Vector) -> None:
        """Raise ValueError unless ``vector`` has this layout's length and only finite values."""
        if vector.shape != (self.size,):
            raise ValueError(f"the model has {self.size} values, the vector {vector.shape}")
        for start, stop in spans(vector.size, vector.itemsize):
            if not np.isfinite(vector[start:stop]).all():
                raise ValueError("the vector has values that are not finite")
            give_back(vector)

    def join(self, arrays: Mapping[str, NDArray[np.generic]]) -> Vector:
        flat = np.empty(self.size, dtype=np.float32)
        start = 0
        for name, size in zip(self.names, self.sizes, strict=True):
            flat[start : start + size] = arrays[name].reshape(-1)
            start += size
        return flat

    def split(self, vector: Vector) -> dict[str, Vector]:
        """Return views into ``vector``, by name and in shape."""
        parts: dict[str, Vector] = {}
        start = 0
        for name, shape, size in zip(self.names, self.shapes, self.sizes, strict=True):
            parts[name] = vector[start : start + size].reshape(shape)
            start += size
        return parts


def as_bytes(vector: Vector) -> NDArray[np.uint8]:
    """Return a vector as little-endian bytes, without a copy on little-endian machines."""
    return vector.astype("<f4", copy=False).view(np.uint8)


def as_type(part: Vector, dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.asarray(part if dtype.kind == "f" else np.rint(part), dtype)


def as_vector(data: NDArray[np.uint8], layout: Layout, sender: str) -> Vector:
    """View a peer's bytes as float32 [layout.size], values unchecked; raise ProtocolError for a wrong length."""
    if data.nbytes != layout.nbytes:
        raise ProtocolError(sender, "length", f"it has {data.nbytes} bytes, not {layout.nbytes}")
    return data.view(np.float32)
