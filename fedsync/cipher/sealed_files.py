"""Where sealed messages lie that are large: in files, which whoever needs them maps and reads in spans."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from fedsync.common.files import private_folder
from fedsync.core.errors import ConfigError
from fedsync.core.spans import file_part, map_file, pieces
from fedsync.core.transfer import Payload

_LARGE_BYTES = 2**20


class SealedFiles:
    """Makes payloads, uint8 [bytes], that nobody may write to. A file goes with the last array that shows it.

    Args:
        folder: for the files, which are this process's alone: it is made when it is needed, and what a process that was
            killed has left there goes. None keeps all in memory.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def keep(self, payload: Payload) -> Payload:
        """The same bytes; those of a small payload, and of one in a file, stay where they are.

        Raises:
            ConfigError: the disk does not take them.
        """
        if self._folder is None or payload.nbytes < _LARGE_BYTES or file_part(payload) is not None:
            return payload
        return self.write(payload.nbytes, pieces(payload))

    def write(self, nbytes: int, parts: Iterable[bytes | memoryview]) -> Payload:
        """A payload of parts, which are asked for one after the other.

        Raises:
            ConfigError: the disk does not take them.
        """
        if self._folder is None or nbytes < _LARGE_BYTES:
            return _joined(nbytes, parts)
        unfinished: Path | None = None
        try:
            descriptor, name = tempfile.mkstemp(dir=private_folder(self._folder))
            unfinished = Path(name)
            with os.fdopen(descriptor, "wb") as file:
                file.writelines(parts)
            mapped, unfinished = map_file(unfinished, remove=True), None
            return mapped
        except OSError as error:
            problem = f"cannot be written: {error.strerror}"
            raise ConfigError(str(self._folder), problem, "Check the folder, its permissions and the disk") from error
        finally:
            if unfinished is not None:
                unfinished.unlink(missing_ok=True)


def _joined(nbytes: int, parts: Iterable[bytes | memoryview]) -> Payload:
    """Into the memory that they take, and no more."""
    whole, at = bytearray(nbytes), 0
    for part in parts:
        whole[at : at + len(part)] = part
        at += len(part)
    joined = np.frombuffer(whole, dtype=np.uint8)
    joined.flags.writeable = False
    return joined
