"""A pickle in which dataclasses are their fields by name, and large arrays only places in a list."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from math import inf
from typing import Any

import numpy as np

from fedsync.server.array_files import Large, in_own_file


def dump(value: object, least: float = inf) -> tuple[bytes, list[Large]]:
    """The pickle, and the arrays that are no part of it, each once: large ones, or those of ``least`` bytes."""
    file = io.BytesIO()
    writer = _NamedPickler(file, least)
    writer.dump(value)
    return file.getvalue(), writer.large


def load(data: bytes, arrays: Sequence[Large]) -> Any:
    """What `dump` was given. What a pickle says is done, so let it be this program's own."""
    return _NamedUnpickler(io.BytesIO(data), arrays).load()


class _NamedPickler(pickle.Pickler):
    """Writes dataclasses as their fields by name; left to itself, pickle writes slots in the order of the fields."""

    def __init__(self, file: io.BytesIO, least: float) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._least = least
        self.large: list[Large] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        # It is asked of each number there is, so the types are looked at here first.
        kind = type(value)
        if (kind is not np.ndarray and kind is not bytes) or not in_own_file(value, self._least):
            return None
        place = self._places.setdefault(id(value), len(self.large))
        if place == len(self.large):
            self.large.append(value)
        return place

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        names = _field_names(kind)
        if names is None:
            return NotImplemented
        return _value, (kind, {name: getattr(value, name) for name in names})


def _field_names(kind: type) -> tuple[str, ...] | None:
    """Of a dataclass; None of any other type."""
    if kind not in _NAMES:
        _NAMES[kind] = tuple(field.name for field in fields(kind)) if is_dataclass(kind) else None
    return _NAMES[kind]


_NAMES: dict[type, tuple[str, ...] | None] = {}


class _NamedUnpickler(pickle.Unpickler):
    """Reads what `_NamedPickler` wrote."""

    def __init__(self, file: io.BytesIO, arrays: Sequence[Large]) -> None:
        super().__init__(file)
        self._arrays = arrays

    def persistent_load(self, pid: int) -> Large:
        return self._arrays[pid]


def _value(kind: type, named: Mapping[str, Any]) -> Any:
    value: Any = object.__new__(kind)
    for name, part in named.items():
        object.__setattr__(value, name, part)
    return value
