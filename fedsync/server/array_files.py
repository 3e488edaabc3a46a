"""Parts of a checkpoint: a pickle with dataclass fields by name, and array files that checkpoints share.

A checkpoint names its arrays: raw files named by their SHA-256. An array file exists completely or not at all. If a
process already maps an array from a file, the file is linked instead of written again. Reading verifies the hash.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from math import inf
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fedsync.common.errors import FedSyncError
from fedsync.common.files import OWNER_FILE, settle_file, write_pieces
from fedsync.model.chunked_arrays import digest, is_large, link_file, map_file, pieces

LASTING_BYTES = 2**14
"""Minimum size of an array with its own file under encryption [bytes], where many checkpoints share the same sums.
Below it, and in the clear, where arrays change with each version, a further file costs more than writing again."""

_SUFFIX = ".raw"

Large = NDArray[Any] | bytes


class Damaged(FedSyncError):
    """Error: a file that belongs to a checkpoint is missing, incomplete or changed."""


@dataclass(frozen=True, slots=True)
class ArrayName:
    """Reference to an array in a checkpoint: data type (empty for `bytes`), shape, and SHA-256, hexadecimal."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str

    @classmethod
    def of(cls, value: Large) -> Self:
        if isinstance(value, bytes):
            return cls("", (len(value),), hashlib.sha256(value).hexdigest())
        return cls(value.dtype.str, value.shape, digest(value).hex())


def in_own_file(value: object, least: float = inf) -> bool:
    """Whether a value has its own file: it is read-only, and large or of at least ``least`` bytes."""
    if type(value) is np.ndarray:
        still = value.dtype.kind in "fiub" and value.flags.c_contiguous and not value.flags.writeable
        return still and (value.nbytes >= least or is_large(value.nbytes))
    return type(value) is bytes and (len(value) >= least or is_large(len(value)))


class ArrayFiles:
    """Arrays of the checkpoints in a folder; one thread may `write` while another calls `settle` or `prune`. ``least``
    is the minimum size of an array with its own file [bytes]; large arrays always have a file.
    """

    def __init__(self, folder: Path, least: float = inf) -> None:
        self.least = least
        self._folder = folder
        self._written: dict[int, tuple[Large, ArrayName]] = {}
        self._safe: set[str] = set()
        # `prune` must not delete arrays that a checkpoint is about to name.
        self._alone = threading.Lock()

    def write(self, values: Sequence[Large]) -> list[ArrayName]:
        """Write a file for each value; values of the previous call are not hashed again. The files survive this
        process, but not yet a crash of the machine: see `settle`. Both raise `ConfigError` if a file cannot be written.
        """
        # `_written` keeps its values alive, so their ids are unique.
        written = {id(value): self._written.get(id(value)) or (value, ArrayName.of(value)) for value in values}
        with self._alone:
            for value, name in written.values():
                path = self._folder / (name.sha256 + _SUFFIX)
                if not path.exists():
                    self._safe.discard(name.sha256)
                    data = np.frombuffer(value, np.uint8) if isinstance(value, bytes) else value
                    # A file that is longer than the array has another hash, and is not linked.
                    if not link_file(data, path):
                        write_pieces(path, pieces(data), OWNER_FILE, settle=False)
            self._written = written
        return [written[id(value)][1] for value in values]

    def settle(self, names: Iterable[ArrayName]) -> None:
        for name in {each.sha256 for each in names} - self._safe:
            settle_file(self._folder / (name + _SUFFIX))
            self._safe.add(name)

    def prune(self, needed: Callable[[], Iterable[ArrayName]]) -> None:
        """Remove all arrays except the result of ``needed`` and the arrays of the last `write`."""
        with self._alone:  # the call, too: since an earlier one, another thread may have written two checkpoints
            stay = {name.sha256 for name in needed()} | {name.sha256 for _, name in self._written.values()}
            for path in self._folder.glob(f"*{_SUFFIX}"):
                if path.stem not in stay:
                    path.unlink(missing_ok=True)
                    self._safe.discard(path.stem)


def read(folder: Path, name: ArrayName) -> Large:
    """Read a value; an array is mapped from its file. `Damaged` if the file is missing or damaged, and is removed."""
    path = folder / (name.sha256 + _SUFFIX)
    try:
        value: Large = map_file(path, name.dtype).reshape(name.shape) if name.dtype else path.read_bytes()
        if ArrayName.of(value) == name:
            return value
    except (OSError, ValueError):
        pass  # the file is missing, or has another length
    path.unlink(missing_ok=True)  # else `write` would take the damaged file for complete
    raise Damaged(f"its array {path.name} is missing, torn or corrupt")


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
        kind: type = type(value)
        names = _field_names(kind)
        if names is None:
            return NotImplemented
        return _value, (kind, {name: getattr(value, name) for name in names})


@cache
def _field_names(kind: type) -> tuple[str, ...] | None:
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else None


class _NamedUnpickler(pickle.Unpickler):
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
