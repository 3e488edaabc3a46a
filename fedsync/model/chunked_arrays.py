"""Processing and storage of large arrays in spans, so that a process holds one span in memory at a time.

Pages of a map that were read count as memory of the process until they are released, so code that walks an array calls
`give_back` as it proceeds. The data stay in the file, and a second read uses the system's cache.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from fedsync.common import foreign
from fedsync.common.errors import ConfigError
from fedsync.common.files import private_folder, writing

SPAN_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class FilePart:
    """Range of bytes of a file. The file may be removed, but not changed, while the range is in use."""

    path: Path
    offset: int
    nbytes: int


class Hash(Protocol):
    """Hash object of `hashlib`."""

    def update(self, data: memoryview, /) -> None: ...

    def digest(self) -> bytes: ...


def spans(count: int, item_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield start and stop of each span of an array of ``count`` items of ``item_bytes`` each."""
    step = max(1, SPAN_BYTES // item_bytes)
    for start in range(0, count, step):
        yield start, min(start + step, count)


def map_file(
    path: Path, dtype: DTypeLike = np.uint8, offset: int = 0, count: int = -1, *, remove: bool = False
) -> NDArray[Any]:
    """Map a file, or a part of it, as a flat read-only array. The file must not change while mapped; removal is safe.

    ``offset`` is in bytes; ``count`` -1 means all items to the end. With ``remove``, the file is deleted with its last
    array, or when this process exits normally. Raises OSError if the file is unreadable, ValueError if it is too short.
    """
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    _PATHS[mapped] = path
    if remove:
        weakref.finalize(mapped, _remove, path, os.getpid())
    return np.frombuffer(mapped, dtype, count, offset)


def give_back(*arrays: NDArray[Any]) -> None:
    """Release this process's pages of the maps behind the arrays; no effect on arrays in memory."""
    for array in arrays:
        mapped = _map_of(array)
        if mapped is not None:
            mapped.madvise(mmap.MADV_DONTNEED)


def file_part(array: NDArray[Any]) -> FilePart | None:
    """Return the location of an array from `map_file`, or of a contiguous part of it; None for other arrays."""
    mapped = _map_of(array)
    if mapped is None or not array.flags.c_contiguous:
        return None
    begins = np.frombuffer(mapped, np.uint8).ctypes.data
    return FilePart(_PATHS[mapped], array.ctypes.data - begins, array.nbytes)


def link_file(array: NDArray[Any], path: Path) -> bool:
    """Hard-link the file that the array maps as a whole to ``path``; return False if that is impossible."""
    part = file_part(array)
    with suppress(OSError):
        if part is not None and part.path.stat().st_size == part.nbytes:
            os.link(part.path, path)
            return True
    return False


def pieces(array: NDArray[Any]) -> Iterator[memoryview]:
    """Yield the bytes of a flat array span by span; release the pages of a map after each span."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    for start, stop in spans(data.size, 1):
        yield data[start:stop].data
        give_back(data)


def digest(array: NDArray[Any], kind: Callable[[], Hash] = hashlib.sha256) -> bytes:
    hashed = kind()
    for piece in pieces(array):
        hashed.update(piece)
    return hashed.digest()


_PATHS: weakref.WeakKeyDictionary[mmap.mmap, Path] = weakref.WeakKeyDictionary()


def _map_of(array: NDArray[Any]) -> mmap.mmap | None:
    """Return the array's map if `map_file` made it: only these maps surely hold no unwritten data."""
    base: object = array
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    return base if isinstance(base, mmap.mmap) and base in _PATHS else None


def _remove(path: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked process has the map too, but does not own the file
        path.unlink(missing_ok=True)


logger = foreign.logger(__name__)

LARGE_BYTES = 2**20


def is_large(nbytes: int) -> bool:
    return nbytes >= LARGE_BYTES


class ArrayKeeper:
    """Factory of flat read-only arrays, in files that are deleted with the last array that maps them.

    Methods raise `ConfigError` if the disk cannot store an array; with ``or_memory``, they keep it in memory, and log
    this once. ``folder`` is for this process alone: leftovers of a killed process are removed. None keeps all arrays in
    memory.
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
            logger.warning("large arrays stay in memory: %s", error)
        self._failed = True


def _in_file(folder: Path, parts: Iterable[bytes | memoryview], kind: np.dtype[Any]) -> NDArray[Any]:
    with writing(folder):
        descriptor, name = tempfile.mkstemp(dir=private_folder(folder))
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.writelines(parts)
            return map_file(Path(name), kind, remove=True)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def _still(array: NDArray[Any]) -> NDArray[Any]:
    view = array.view()
    view.flags.writeable = False
    return view
