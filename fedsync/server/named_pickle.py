"""Pickle format with dataclass fields by name, and large arrays as indices into a list."""

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
    """Return the pickle and the arrays outside it, each once: large arrays, or those of at least ``least`` bytes."""
    file = io.BytesIO()
    writer = _NamedPickler(file, least)
    writer.dump(value)
    return file.getvalue(), writer.large


def load(data: bytes, arrays: Sequence[Large]) -> Any:
    """Return the value that `dump` received. Loading executes the pickle, so load only data of this program."""
    return _NamedUnpickler(io.BytesIO(data), arrays).load()


class _NamedPickler(pickle.Pickler):
    """Pickler that writes dataclass fields by name; pickle's default writes slots in field order."""

    def __init__(self, file: io.BytesIO, least: float) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._least = least
        self.large: list[Large] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        # pickle calls this for every object, even for numbers, so the cheap type check comes first.
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
    """Return the field names of a dataclass; None for any other type."""
    if kind not in _NAMES:
        _NAMES[kind] = tuple(field.name for field in fields(kind)) if is_dataclass(kind) else None
    return _NAMES[kind]


_NAMES: dict[type, tuple[str, ...] | None] = {}


class _NamedUnpickler(pickle.Unpickler):
    """Unpickler for the output of `_NamedPickler`."""

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
