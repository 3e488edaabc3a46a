"""Storage of large arrays in memory-mapped files, which are read in spans."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from fedsync.common import foreign
from fedsync.common.errors import ConfigError
from fedsync.common.files import private_folder
from fedsync.model.chunked_arrays import file_part, map_file, pieces, spans

logger = foreign.logger(__name__)

LARGE_BYTES = 2**20


def is_large(nbytes: int) -> bool:
    return nbytes >= LARGE_BYTES


class ArrayKeeper:
    """Factory of flat read-only arrays. A file is deleted with the last array that maps it.

    Methods raise `ConfigError` if the disk cannot store an array and ``or_memory`` is off.

    Args:
        folder: folder for the files, owned by this process alone. It is created on demand; leftovers of a killed
            process are removed. None keeps all arrays in memory.
        or_memory: keep arrays in memory when the disk fails, and log this once.
    """

    def __init__(self, folder: Path | None = None, *, or_memory: bool = False) -> None:
        self._folder, self._or_memory, self._failed = folder, or_memory, False
        self.close()

    def close(self) -> None:
        """Remove the files. Existing arrays stay valid while this process lives."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def keep(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return the same values, read-only. Small arrays and arrays that lie in a file are not copied."""
        if self._folder is None or not is_large(array.nbytes) or file_part(array) is not None:
            return _still(array)
        try:
            return _in_file(self._folder, pieces(array), array.dtype)
        except ConfigError as error:
            self._do_without(error)
            return _still(array)

    def make(self, dtype: DTypeLike, size: int, part: Callable[[int, int], NDArray[Any]]) -> NDArray[Any]:
        """Build an array from ``part``, which is called for all spans in order, and again if the disk is full."""
        kind = np.dtype(dtype)
        if self._folder is not None and is_large(size * kind.itemsize):
            made = (np.ascontiguousarray(part(*span), kind).data for span in spans(size, kind.itemsize))
            try:
                return _in_file(self._folder, made, kind)
            except ConfigError as error:
                self._do_without(error)
        whole = np.empty(size, kind)
        for start, stop in spans(size, kind.itemsize):
            whole[start:stop] = part(start, stop)
        return _still(whole)

    def join(self, parts: Sequence[NDArray[Any]]) -> NDArray[np.uint8]:
        return self.write_again(sum(part.nbytes for part in parts), lambda: chain.from_iterable(map(pieces, parts)))

    def write(self, nbytes: int, parts: Iterable[bytes | memoryview]) -> NDArray[np.uint8]:
        """Concatenate byte parts from an iterator that can be read only once, so ``or_memory`` cannot help."""
        if self._folder is not None and is_large(nbytes):
            return _in_file(self._folder, parts, np.dtype(np.uint8))
        whole, at = bytearray(nbytes), 0
        for part in parts:
            whole[at : at + len(part)] = part
            at += len(part)
        return _still(np.frombuffer(whole, dtype=np.uint8))

    def write_again(self, nbytes: int, parts: Callable[[], Iterable[bytes | memoryview]]) -> NDArray[np.uint8]:
        """Concatenate byte parts, which are requested again if the disk is full and ``or_memory`` is on."""
        try:
            return self.write(nbytes, parts())
        except ConfigError as error:
            self._do_without(error)
            return ArrayKeeper().write(nbytes, parts())

    def _do_without(self, error: ConfigError) -> None:
        if not self._or_memory:
            raise error
        if not self._failed:
            logger.warning("what is large stays in memory: %s", error)
        self._failed = True


def _in_file(folder: Path, parts: Iterable[bytes | memoryview], kind: np.dtype[Any]) -> NDArray[Any]:
    unfinished: Path | None = None
    try:
        descriptor, name = tempfile.mkstemp(dir=private_folder(folder))
        unfinished = Path(name)
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(parts)
        mapped, unfinished = map_file(unfinished, kind, remove=True), None
        return mapped
    except OSError as error:
        problem = f"cannot be written: {error.strerror}"
        raise ConfigError(str(folder), problem, "Check the folder, its permissions and the disk") from error
    finally:
        if unfinished is not None:
            unfinished.unlink(missing_ok=True)


def _still(array: NDArray[Any]) -> NDArray[Any]:
    view = array.view()
    view.flags.writeable = False
    return view
