"""Where a server keeps models and updates: large ones in files, which it maps and reads in spans."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from fedsync.common.files import private_folder
from fedsync.core.errors import ConfigError
from fedsync.core.spans import file_part, map_file, spans

logger = logging.getLogger(__name__)

LARGE_BYTES = 2**20
"""What is smaller stays in memory."""


class ArrayKeeper:
    """Makes arrays that nobody may write to.

    A file goes with the last array that shows it. Where the disk takes no more, memory has to.

    Args:
        folder: for the files, which are this process's alone: it is made when it is needed, and what a process that was
            killed has left there goes. None keeps all in memory.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._failed = False
        self.close()

    def close(self) -> None:
        """Remove the files; arrays stay what they are as long as this process lives."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def keep(self, array: NDArray[Any]) -> NDArray[Any]:
        """The same values, flat; those of a small array, and of one in a file, stay where they are."""
        if self._folder is None or array.nbytes < LARGE_BYTES or file_part(array) is not None:
            return _still(array)
        return self.make(array.dtype, array.size, lambda start, stop: array[start:stop])

    def make(self, dtype: DTypeLike, size: int, part: Callable[[int, int], NDArray[Any]]) -> NDArray[Any]:
        """An array of parts.

        Args:
            dtype: of the array.
            size: of the array.
            part: makes the values from a start to a stop; asked for all in order, twice where the disk is full.
        """
        kind = np.dtype(dtype)
        if self._folder is not None and size * kind.itemsize >= LARGE_BYTES:
            try:
                return self._in_file(self._folder, kind, size, part)
            except (OSError, ConfigError) as error:
                if not self._failed:
                    logger.warning("models and updates stay in memory, for %s takes none: %s", self._folder, error)
                self._failed = True
        made = np.empty(size, kind)
        for start, stop in spans(size, kind.itemsize):
            made[start:stop] = part(start, stop)
        return _still(made)

    @staticmethod
    def _in_file(
        folder: Path, kind: np.dtype[Any], size: int, part: Callable[[int, int], NDArray[Any]]
    ) -> NDArray[Any]:
        descriptor, name = tempfile.mkstemp(dir=private_folder(folder))
        path = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                for start, stop in spans(size, kind.itemsize):
                    file.write(np.ascontiguousarray(part(start, stop), kind).data)
            return map_file(path, kind, remove=True)
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def _still(array: NDArray[Any]) -> NDArray[Any]:
    """A view that cannot be written to."""
    view = array.view()
    view.flags.writeable = False
    return view
