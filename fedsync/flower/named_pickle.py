"""A pickle in which dataclasses are their fields by name, and large arrays only places in a list."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from math import inf
from typing import Any

from fedsync.flower.array_files import Large, in_own_file


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
        if not in_own_file(value, self._least):
            return None
        place = self._places.setdefault(id(value), len(self.large))
        if place == len(self.large):
            self.large.append(value)
        return place

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type) or not is_dataclass(value):
            return NotImplemented
        return _value, (type(value), {field.name: getattr(value, field.name) for field in fields(value)})


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
