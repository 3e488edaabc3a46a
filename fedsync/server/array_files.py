"""Arrays of checkpoints: raw files named by their SHA-256, so what several checkpoints have is written once.

A checkpoint names the arrays that belong to it. A file is there as a whole or not at all: one that a process maps
already is linked, not written again. Reading checks its hash.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fedsync.common.errors import FedSyncError
from fedsync.common.files import OWNER_FILE, settle_file, write_pieces
from fedsync.model.array_keeper import is_large
from fedsync.model.chunked_arrays import digest, link_file, map_file, pieces

LASTING_BYTES = 2**14
"""Of an array that has a file of its own under encryption, where checkpoints have the same sums for dozens of versions.
Below it, and in the clear, where arrays change with each version, a file more costs more than to write them again."""

_SUFFIX = ".raw"

Large = NDArray[Any] | bytes
"""A value that never changes and is large."""


class Damaged(FedSyncError):
    """An array is not what was written."""


@dataclass(frozen=True, slots=True)
class ArrayName:
    """What a checkpoint says of an array.

    Args:
        dtype: NumPy's name of the type; empty for `bytes`.
        shape: of the array.
        sha256: of its bytes, hexadecimal.
    """

    dtype: str
    shape: tuple[int, ...]
    sha256: str

    @classmethod
    def of(cls, value: Large) -> Self:
        """Of a value, all of which is read."""
        if isinstance(value, bytes):
            return cls("", (len(value),), hashlib.sha256(value).hexdigest())
        return cls(value.dtype.str, value.shape, digest(value).hex())


def in_own_file(value: object, least: float = inf) -> bool:
    """Whether a value is kept in a file of its own: one that nobody may write to, large or of ``least`` bytes."""
    if type(value) is np.ndarray:
        still = value.dtype.kind in "fiub" and value.flags.c_contiguous and not value.flags.writeable
        return still and (value.nbytes >= least or is_large(value.nbytes))
    return type(value) is bytes and (len(value) >= least or is_large(len(value)))


class ArrayFiles:
    """The arrays of the checkpoints in a folder. One thread writes; another may settle and prune meanwhile.

    Args:
        folder: of the checkpoints.
        least: bytes of an array that has a file of its own; a large one has it in any case.
    """

    def __init__(self, folder: Path, least: float = inf) -> None:
        self.least = least
        self._folder = folder
        self._written: dict[int, tuple[Large, ArrayName]] = {}
        self._safe: set[str] = set()
        # What is about to be named by a checkpoint must not go, although none names it yet.
        self._alone = threading.Lock()

    def write(self, values: Sequence[Large]) -> list[ArrayName]:
        """Have a file of each value; those that the last call had too are not looked at again.

        They outlive this process, but not yet this machine's: see `settle`.

        Raises:
            ConfigError: the disk does not take one.
        """
        written = {id(value): (value, self._name(value)) for value in values}
        with self._alone:
            for value, name in written.values():
                path = self._folder / (name.sha256 + _SUFFIX)
                if not path.exists():
                    self._safe.discard(name.sha256)
                    _place(value, path)
            self._written = written
        return [written[id(value)][1] for value in values]

    def settle(self, names: Iterable[ArrayName]) -> None:
        """Wait until arrays are on disk, where they outlive the machine's death too.

        Raises:
            ConfigError: the disk does not take one.
        """
        for name in {each.sha256 for each in names} - self._safe:
            settle_file(self._folder / (name + _SUFFIX))
            self._safe.add(name)

    def prune(self, needed: Iterable[ArrayName]) -> None:
        """Remove all but those that are needed."""
        with self._alone:
            stay = {name.sha256 for name in needed} | {name.sha256 for _, name in self._written.values()}
            for path in self._folder.glob(f"*{_SUFFIX}"):
                if path.stem not in stay:
                    path.unlink(missing_ok=True)
                    self._safe.discard(path.stem)

    def _name(self, value: Large) -> ArrayName:
        known = self._written.get(id(value))  # which keeps the value, so nothing else can have this number
        return ArrayName.of(value) if known is None else known[1]


def read(folder: Path, name: ArrayName) -> Large:
    """A value that was written; an array is a map of its file.

    Raises:
        Damaged: the file is not there, or is not what was written; it is removed.
    """
    path = folder / (name.sha256 + _SUFFIX)
    try:
        value: Large = map_file(path, name.dtype).reshape(name.shape) if name.dtype else path.read_bytes()
        if ArrayName.of(value) == name:
            return value
    except (OSError, ValueError):
        pass  # it is not there, or has another length
    path.unlink(missing_ok=True)  # or it would be taken for whole when such an array is written again
    raise Damaged(f"its array {path.name} is missing, torn or corrupt")


def _place(value: Large, path: Path) -> None:
    data = np.frombuffer(value, np.uint8) if isinstance(value, bytes) else value
    if not link_file(data, path):  # of a file that is longer than the array the hash would be another
        write_pieces(path, pieces(data), OWNER_FILE, settle=False)
