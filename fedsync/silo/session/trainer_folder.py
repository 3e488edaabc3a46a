"""A trainer's folder: an exclusive lock on it, and what keeps it from filling the disk.

The kernel's lock is one process's from before it loads anything until it is gone, however it ends, and names that
process to whoever asks. A child does not inherit it. Old trainers' folders go, and so does the beginning of a long log.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from fedsync.common import foreign
from fedsync.common.files import remove_tree, tree_bytes

logger = foreign.logger(__name__)

_RECENT_S = 3600.0
"""A folder that was used so recently [s] stays: its trainer may be about to start, or its run may pause."""

HOME = "room"
"""Folder in a trainer's: that of its training process, which may write to it; emptied whenever one starts."""

TENURE = "trainer.lock"
"""File in a trainer's folder that the lock is on."""

_FLOCK = struct.Struct("hhqqi4x")
"""C's ``struct flock`` on 64-bit Linux: kind, whence, start, length, process."""


class FolderLock:
    """An exclusive lock on a trainer's folder, until the process ends; see `take`.

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


@dataclass(frozen=True, slots=True)
class Leftover:
    """A trainer's folder.

    Args:
        path: of the folder.
        nbytes: of all files in it.
        used_s: when one of them was last written [s since the epoch].
    """

    path: Path
    nbytes: int
    used_s: float


def superfluous(found: list[Leftover], quota_bytes: int, busy: Callable[[Path], bool]) -> list[Path]:
    """Which folders have to go so that the rest fits, oldest first; never the newest, nor one that is busy."""
    total = sum(each.nbytes for each in found)
    doomed = []
    for each in sorted(found, key=lambda each: (each.used_s, each.path))[:-1]:
        if total <= quota_bytes:
            break
        if not busy(each.path):
            doomed.append(each.path)
            total -= each.nbytes
    return doomed


def fits(root: Path, quota_bytes: int) -> bool:
    """Whether what is in ``root`` has at most so many bytes, once what may go is gone."""
    found = _folders(root)
    doomed = _remove_superfluous(found, quota_bytes)
    return sum(each.nbytes for each in found if each.path not in doomed) <= quota_bytes


def tidy(root: Path, quota_bytes: int) -> list[Path]:
    """Remove trainers' folders in ``root`` until at most ``quota_bytes`` are left; returns those removed.

    One that is wanted again after all is made anew, and its silo goes on as one whose disk was lost.
    """
    return _remove_superfluous(_folders(root), quota_bytes)


def _remove_superfluous(found: list[Leftover], quota_bytes: int) -> list[Path]:
    recent = {each.path for each in found if time.time() - each.used_s < _RECENT_S}
    doomed = superfluous(found, quota_bytes, lambda folder: folder in recent or tenant(folder) is not None)
    for folder in doomed:
        logger.warning("removed %s: the state folder has more than %d bytes", folder, quota_bytes)
        with contextlib.suppress(OSError):
            remove_tree(folder)
    return doomed


def bound_log(log: Path, most_bytes: int) -> None:
    """Put a log that has grown longer aside as ``<name>.1``, its last ``most_bytes``, and empty it.

    For one that processes hold open to append to, and would go on writing to under any name.
    """
    older = log.with_name(f"{log.name}.1")
    try:
        if log.stat().st_size <= most_bytes:
            return
        with log.open("rb") as file:
            file.seek(-most_bytes, os.SEEK_END)
            older.write_bytes(file.read(most_bytes))
    except FileNotFoundError:
        return
    except OSError:  # A full disk: to have room matters more than what was said.
        older.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        os.truncate(log, 0)


def _folders(root: Path) -> list[Leftover]:
    return [_measure(folder) for folder in root.iterdir() if folder.is_dir()] if root.is_dir() else []


def _measure(folder: Path) -> Leftover:
    nbytes, used_s = tree_bytes(folder / HOME), 0.0  # whatever a user's code made of it
    for path in folder.iterdir():
        for file in [path, *([] if path.name == HOME else path.rglob("*"))]:
            try:
                status = file.lstat()
            except FileNotFoundError:  # it went while we looked
                continue
            nbytes += 0 if path.name == HOME else status.st_size
            used_s = max(used_s, status.st_mtime)
    return Leftover(folder, nbytes, used_s)
