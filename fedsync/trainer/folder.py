"""Whose a trainer's folder is: one process's at a time, from before it loads anything until it is gone.

A lock of the kernel's says so, which goes with its process however that ends, and names it to whoever asks. A child
does not inherit it.
"""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path
from typing import Self

TENURE = "trainer.lock"
"""File in a trainer's folder that the lock is on."""

_FLOCK = struct.Struct("hhqqi4x")
"""C's ``struct flock`` on 64-bit Linux: kind, whence, start, length, process."""


class FolderLock:
    """A folder that is this process's own until the process ends; see `take`.

    Args:
        path: of the file.
        descriptor: of the file, with the lock; never closed.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    @classmethod
    def take(cls, folder: Path) -> Self | None:
        """Make a folder this process's own, or learn that it is another's: None."""
        path = folder / TENURE
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            os.close(descriptor)
            return None
        return cls(path, descriptor)

    @property
    def lasts(self) -> bool:
        """Whether the folder is still there: in one made anew in its place another process may live."""
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False
        except OSError:  # It cannot be looked at just now.
            return True


def tenant(folder: Path) -> int | None:
    """Number of the process that has a folder, 0 if it is not one of this machine's; None if nobody has it.

    Not to be asked by the tenant itself: to close the file would end its tenure.
    """
    try:
        descriptor = os.open(folder / TENURE, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    finally:
        os.close(descriptor)
    return None if kind == fcntl.F_UNLCK else max(int(pid), 0)
