"""Files that a run may read at a silo: files below the owner's data folders, never keys, certificates or state.

The server chooses the paths in a run, and a path may be a link or another name of a protected file. So the path is
resolved first, and the file is then opened part by part from the data folder on, without following links. The opened
file must be a plain file outside closed folders (keys, certificates, state), and no hard link of a file in them.
Emulated silos have no limit.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from fedsync.common.errors import OwnerRefusal

ALLOWED = "FEDSYNC_ALLOWED"
"""Environment variable of a silo: permissions as JSON (`fedsync.silo.owner.owner_policy.OwnerPolicy`), or empty."""

SYSTEM = ("/proc", "/sys")
"""Kernel folders: they hold no data, and partly expose this process's memory."""

_Place = tuple[int, int]
"""Device and inode of a file, which identify it independently of its names."""


@dataclass(frozen=True, slots=True)
class Fence:
    """Files that runs may read: files in ``below``, except files in ``never``. Both have absolute paths of files and
    folders, without links.
    """

    below: tuple[str, ...] = ()
    never: tuple[str, ...] = ()

    def located(self, path: str | Path) -> Path:
        """Return the path without links; raises `OwnerRefusal` if runs may not read the target."""
        return self._inside(path)[1]

    def open(self, path: str | Path) -> BinaryIO:
        """Open a file for reading; raises `OwnerRefusal` if runs may not read it, else `OSError` on failure."""
        folder, found = self._inside(path)
        descriptor = _walk(folder, found.relative_to(folder).parts, self._closed(), path)
        try:
            status = os.fstat(descriptor)
            second_name = status.st_nlink > 1 and _place(status) in _files_in(self.never, int(time.monotonic()))
            if not stat.S_ISREG(status.st_mode) or second_name or _place(status) in self._closed():
                raise _refusal(path)
            return os.fdopen(descriptor, "rb")
        except BaseException:
            os.close(descriptor)
            raise

    def ways(self) -> tuple[Path, ...]:
        """Paths that together hold all readable files. A folder with a closed part is replaced by its open parts,
        without parts that are added later.
        """
        return tuple(way for each in self.below for way in self._open_parts(Path(each)))

    def _open_parts(self, path: Path) -> list[Path]:
        if any(path.is_relative_to(each) for each in self.never):
            return []
        if not any(Path(each).is_relative_to(path) for each in self.never):
            return [path]
        parts = [each for each in sorted(path.iterdir()) if not each.is_symlink()]  # a link may lead to a closed file
        return [part for each in parts for part in self._open_parts(each)]

    def check_names(self) -> None:
        """Raise `OwnerRefusal` if a closed file has a second name (hard link) below the readable folders."""
        second = frozenset(_place(found) for found in self._closed_files() if found.st_nlink > 1)
        if not second:
            return
        for path in _paths_in(self.below):
            if _look(path) in second and not any(path.is_relative_to(each) for each in self.never):
                problem = f"{path} is a second name (hard link) of a file that no run may read"
                raise OwnerRefusal("silo.yaml, data", problem, "Remove it")

    def _closed_files(self) -> Iterator[os.stat_result]:
        for file in (*map(Path, self.never), *_paths_in(self.never)):
            with suppress(OSError):
                status = file.lstat()
                if stat.S_ISREG(status.st_mode):
                    yield status

    def _inside(self, path: str | Path) -> tuple[str, Path]:
        try:
            found = Path(path).resolve()
        except (OSError, ValueError, RuntimeError):  # a loop of links, or an invalid path
            raise _refusal(path) from None
        folder = next((each for each in self.below if found.is_relative_to(each)), None)
        if folder is None or any(found.is_relative_to(each) for each in (*self.never, *SYSTEM)):
            raise _refusal(path)
        return (str(found.parent) if folder == str(found) else folder), found

    def _closed(self) -> frozenset[_Place]:
        """Identities of the closed files and folders, so that another path (a mount) does not open them."""
        return frozenset(place for each in self.never if (place := _look(Path(each))) is not None)


def open_data(path: str | Path) -> BinaryIO:
    """Open a file that a run names; raises `OwnerRefusal` outside this process's fence, and `OSError` on failure."""
    fence = fence_here()
    return Path(path).open("rb") if fence is None else fence.open(path)


def fence_here() -> Fence | None:
    """Return the fence of this process; None at an emulated silo, and outside of a silo."""
    below, never = allowed_here().get("data"), allowed_here().get("never") or ()
    return None if below is None else Fence(tuple(below), tuple(never))


def allowed_here() -> Mapping[str, Any]:
    """Return the permissions in `ALLOWED`; empty at an emulated silo, and outside of a silo."""
    return _parsed(os.environ.get(ALLOWED) or "{}")


@lru_cache(maxsize=2)
def _parsed(allowed: str) -> Mapping[str, Any]:
    found: dict[str, Any] = json.loads(allowed)
    return found


def _walk(folder: str, parts: tuple[str, ...], closed: frozenset[_Place], path: str | Path) -> int:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    # A path alone: in the room a named file may be read, and the folder that it lies in may not.
    way = os.O_PATH | os.O_DIRECTORY
    descriptor = os.open(folder, flags | way)
    try:
        for last, part in enumerate(parts, start=1 - len(parts)):
            # Opening a pipe must not wait for a writer.
            more = os.O_NONBLOCK if last == 0 else way
            deeper = os.open(part, flags | more, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = deeper
            if _place(os.fstat(descriptor)) in closed:
                raise _refusal(path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@lru_cache(maxsize=2)
def _files_in(never: tuple[str, ...], second: int) -> frozenset[_Place]:
    """Identities of all files in closed folders, refreshed each second."""
    return frozenset(place for path in _paths_in(never) if (place := _look(path)) is not None)


def _paths_in(roots: tuple[str, ...]) -> Iterator[Path]:
    for root in roots:
        for folder, _, names in os.walk(root):
            yield from (Path(folder, name) for name in names)


def _look(path: Path) -> _Place | None:
    try:
        return _place(path.stat())
    except OSError:
        return None


def _place(status: os.stat_result) -> _Place:
    return status.st_dev, status.st_ino


def _refusal(path: str | Path) -> OwnerRefusal:
    remedy = "Name a file in one of its data folders, or have the owner add its folder to data in silo.yaml"
    return OwnerRefusal("task", f"{path} is outside the folders that this silo's owner allows runs to read", remedy)
