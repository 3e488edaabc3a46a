"""Processing of large arrays in spans, and memory-mapped files, so that a process holds one span in memory at a time.

Pages of a map that were read count as memory of the process until they are released. So code that walks an array calls
`give_back` as it proceeds. The data stay in the file, and a second read uses the system's cache.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

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
