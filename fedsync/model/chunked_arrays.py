"""Large arrays in spans, and as maps of files: a process that reads such a map holds only the span that it is at.

Pages of a map that were read count as memory of the process until they are given back. So who walks an array calls
`give_back` as it goes: the file keeps what it has, and what is read again comes from the system's cache.
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
"""What is in work at once of an array that need not be in memory as a whole."""


@dataclass(frozen=True, slots=True)
class FilePart:
    """Bytes of a file.

    Args:
        path: the file; it may have been removed since, though not changed.
        offset: of the first byte.
        nbytes: how many.
    """

    path: Path
    offset: int
    nbytes: int


class Hash(Protocol):
    """One of `hashlib`'s."""

    def update(self, data: memoryview, /) -> None: ...

    def digest(self) -> bytes: ...


def spans(count: int, item_bytes: int) -> Iterator[tuple[int, int]]:
    """Start and stop of each span of an array of ``count`` items, which take ``item_bytes`` each."""
    step = max(1, SPAN_BYTES // item_bytes)
    for start in range(0, count, step):
        yield start, min(start + step, count)


def map_file(
    path: Path, dtype: DTypeLike = np.uint8, offset: int = 0, count: int = -1, *, remove: bool = False
) -> NDArray[Any]:
    """A file, or a part of it, as a flat array that cannot be written to.

    Nobody may change the file as long as the array is in use; it may be removed.

    Args:
        path: the file.
        dtype: of the array.
        offset: of its first byte in the file.
        count: of its items; -1 for all to the end.
        remove: the file goes with the last array that shows it, or with this process if it ends by itself.

    Raises:
        OSError: it cannot be read.
        ValueError: it has not so many bytes, or none.
    """
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    _PATHS[mapped] = path
    if remove:
        weakref.finalize(mapped, _remove, path, os.getpid())
    return np.frombuffer(mapped, dtype, count, offset)


def give_back(*arrays: NDArray[Any]) -> None:
    """Have this process hold no page any more of the maps that arrays show; nothing, where one is in memory."""
    for array in arrays:
        mapped = _map_of(array)
        if mapped is not None:
            mapped.madvise(mmap.MADV_DONTNEED)


def file_part(array: NDArray[Any]) -> FilePart | None:
    """Where an array lies that `map_file` made, or that is a contiguous part of one; None for one in memory."""
    mapped = _map_of(array)
    if mapped is None or not array.flags.c_contiguous:
        return None
    begins = np.frombuffer(mapped, np.uint8).ctypes.data
    return FilePart(_PATHS[mapped], array.ctypes.data - begins, array.nbytes)


def link_file(array: NDArray[Any], path: Path) -> bool:
    """Give the file that an array is all of this name too; False where there is no such file, or it takes no link."""
    part = file_part(array)
    with suppress(OSError):
        if part is not None and part.path.stat().st_size == part.nbytes:
            os.link(part.path, path)
            return True
    return False


def pieces(array: NDArray[Any]) -> Iterator[memoryview]:
    """The bytes of a flat array, span by span; those of a map are given back behind it."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    for start, stop in spans(data.size, 1):
        yield data[start:stop].data
        give_back(data)


def digest(array: NDArray[Any], kind: Callable[[], Hash] = hashlib.sha256) -> bytes:
    """Hash of an array's bytes, which are not copied; `hashlib.sha256` by default."""
    hashed = kind()
    for piece in pieces(array):
        hashed.update(piece)
    return hashed.digest()


_PATHS: weakref.WeakKeyDictionary[mmap.mmap, Path] = weakref.WeakKeyDictionary()


def _map_of(array: NDArray[Any]) -> mmap.mmap | None:
    """What `map_file` mapped, if an array shows it: only of that it is known that nothing in it waits to be written."""
    base: object = array
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    return base if isinstance(base, mmap.mmap) and base in _PATHS else None


def _remove(path: Path, owner: int) -> None:
    if os.getpid() == owner:  # a process that was forked has the map too, and the file is not its own
        path.unlink(missing_ok=True)
