"""Folder of a silo's trainer process: its exclusive lock, and limits of its disk use.

A process locks a file before it loads anything. The kernel keeps the lock until the process ends in any way, and tells
other processes the id of this process. A child process does not inherit the lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import time
from pathlib import Path
from typing import Self

from fedsync.common import foreign
from fedsync.common.files import remove_tree, tree_bytes

logger = foreign.logger(__name__)

_RECENT_S = 3600.0  # a younger folder is never removed: its trainer may be about to start, or its run may pause

HOME = "room"  # subfolder that the training process may write to; emptied at each start of the process

AGENT = "agent"  # folder of the silo's agent, beside those of the trainers; never removed, because it has no `TENURE`

TENURE = "trainer.lock"

_FLOCK = struct.Struct("hhqqi4x")  # C's ``struct flock`` on 64-bit Linux: kind, whence, start, length, process


class FolderLock:
    """Exclusive lock on a trainer's folder, until the process ends. ``descriptor`` is never closed."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    @classmethod
    def take(cls, folder: Path) -> Self | None:
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
        """Whether the locked folder still exists; another process may live in a new folder at the same place."""
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False
        except OSError:  # A temporary failure to read says nothing.
            return True


def tenant(folder: Path) -> int | None:
    """Return the id of the process that holds a folder, 0 if it is not on this machine; None if nobody holds it. The
    holder itself must not call this, because closing the file would release its lock.
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


def tidy(root: Path, quota_bytes: int) -> bool:
    """Remove trainers' folders in ``root``, the oldest first, until ``quota_bytes`` suffice; return whether they do.
    The newest folder, a folder in use, a folder of a recent trainer and the agent's folder stay.
    """
    folders = [folder for folder in root.iterdir() if folder.is_dir()] if root.is_dir() else []
    found = sorted((*_measure(folder), folder) for folder in folders)
    total = sum(nbytes for _, nbytes, _ in found)
    for used_s, nbytes, folder in found[:-1]:
        if total <= quota_bytes:
            break
        if folder.name != AGENT and tenant(folder) is None and time.time() - used_s >= _RECENT_S:
            try:
                remove_tree(folder)
            except OSError as error:
                logger.warning("%s cannot be removed: %s", folder, error)
                continue
            logger.warning("removed %s: the state folder has more than %d bytes", folder, quota_bytes)
            total -= nbytes
    return total <= quota_bytes


def bound_log(log: Path, most_bytes: int) -> None:
    """Copy the last ``most_bytes`` of a longer log to ``<name>.1``, and empty the log, which processes hold open."""
    older = log.with_name(f"{log.name}.1")
    try:
        if log.stat().st_size <= most_bytes:
            return
        with log.open("rb") as file:
            file.seek(-most_bytes, os.SEEK_END)
            older.write_bytes(file.read(most_bytes))
    except FileNotFoundError:
        return
    except OSError:  # On a full disk, free space matters more than the old log.
        older.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        os.truncate(log, 0)


def _measure(folder: Path) -> tuple[float, int]:
    """Time of a folder's newest file [s since the epoch], and size of all its files [bytes]."""
    nbytes, used_s = tree_bytes(folder / HOME), 0.0  # a user's code may have left anything here
    for place, folders, files in os.walk(folder):  # ignores folders that are gone
        home = [HOME] if place == str(folder) and HOME in folders else []
        for name in (*folders, *files):
            try:
                status = Path(place, name).lstat()
            except FileNotFoundError:
                continue
            nbytes += 0 if name in home else status.st_size
            used_s = max(used_s, status.st_mtime)
        folders[:] = [name for name in folders if name not in home]
    return used_s, nbytes
