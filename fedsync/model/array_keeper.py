"""Where large arrays lie: in files, which whoever needs them maps and reads in spans."""

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
    """Whether so many bytes are worth a file of their own."""
    return nbytes >= LARGE_BYTES


class ArrayKeeper:
    """Makes flat arrays that nobody may write to. A file goes with the last array that shows it.

    Args:
        folder: for the files, which are this process's alone: it is made when it is needed, and what a process that was
            killed has left there goes. None keeps all in memory.
        or_memory: what the disk does not take stays in memory, and the log says so once.
    """

    def __init__(self, folder: Path | None = None, *, or_memory: bool = False) -> None:
        self._folder = folder
        self._or_memory = or_memory
        self._failed = False
        self.close()

    def close(self) -> None:
        """Remove the files; arrays stay what they are as long as this process lives."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def keep(self, array: NDArray[Any]) -> NDArray[Any]:
        """The same values; those of a small array, and of one in a file, stay where they are.

        Raises:
            ConfigError: the disk does not take them, and memory may not.
        """
        if self._folder is None or not is_large(array.nbytes) or file_part(array) is not None:
            return _still(array)
        try:
            return _in_file(self._folder, pieces(array), array.dtype)
        except ConfigError as error:
            self._do_without(error)
            return _still(array)

    def make(self, dtype: DTypeLike, size: int, part: Callable[[int, int], NDArray[Any]]) -> NDArray[Any]:
        """An array of parts that can be asked for again.

        Args:
            dtype: of the array.
            size: of the array.
            part: makes the values from a start to a stop; asked for all in order, twice where the disk is full.

        Raises:
            ConfigError: the disk does not take them, and memory may not.
        """
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
        """Bytes of arrays, one behind the other.

        Raises:
            ConfigError: the disk does not take them, and memory may not.
        """
        if self._folder is not None and is_large(sum(part.nbytes for part in parts)):
            try:
                return _in_file(self._folder, chain.from_iterable(map(pieces, parts)), np.dtype(np.uint8))
            except ConfigError as error:
                self._do_without(error)
        return _still(np.concatenate([part.view(np.uint8) for part in parts]))

    def write(self, nbytes: int, parts: Iterable[bytes | memoryview]) -> NDArray[np.uint8]:
        """Bytes of parts that come once, one after the other.

        Raises:
            ConfigError: the disk does not take them; memory cannot have those that went there.
        """
        if self._folder is not None and is_large(nbytes):
            return _in_file(self._folder, parts, np.dtype(np.uint8))
        whole, at = bytearray(nbytes), 0
        for part in parts:
            whole[at : at + len(part)] = part
            at += len(part)
        return _still(np.frombuffer(whole, dtype=np.uint8))

    def write_again(self, nbytes: int, parts: Callable[[], Iterable[bytes | memoryview]]) -> NDArray[np.uint8]:
        """Bytes of parts that can be asked for again, which is done where the disk is full and memory may have them.

        Raises:
            ConfigError: the disk does not take them, and memory may not.
        """
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
    """A view that cannot be written to."""
    view = array.view()
    view.flags.writeable = False
    return view
