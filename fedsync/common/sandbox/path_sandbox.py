"""Which files a run may read at a silo: those below its owner's data folders, and never keys, certificates or state.

What a run names comes from the server, and a name says little: it may lead over links, or to another name of a file.
So a path is resolved first, and the file is then opened part by part from the data folder on, where a link is no part
of a way. What was opened is a plain file, lies in no closed folder, and is no second name (hard link) of a file in one.
An emulated silo has no owner, and no fence.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from fedsync.common.errors import OwnerRefusal

ALLOWED = "FEDSYNC_ALLOWED"
"""Environment variable of a silo: what its owner allows, as JSON, or nothing where the silo is emulated.

Its ``data`` and ``never`` are a fence; `fedsync.silo.owner.owner_policy.OwnerPolicy` is the whole.
"""

SYSTEM = ("/proc", "/sys")
"""Folders of the kernel's: what lies there is no data, and some of it is this process's memory."""

_Place = tuple[int, int]
"""Device and number of a file: what a file is called besides its names."""


@dataclass(frozen=True, slots=True)
class Fence:
    """The files that runs may read.

    Args:
        below: folders and files, absolute and without links; none is no file.
        never: files and folders, likewise, that are closed wherever they lie.
    """

    below: tuple[str, ...] = ()
    never: tuple[str, ...] = ()

    def located(self, path: str | Path) -> Path:
        """The path without links.

        Raises:
            OwnerRefusal: it leads to where runs may not read.
        """
        return self._inside(path)[1]

    def open(self, path: str | Path) -> BinaryIO:
        """A file to read.

        Raises:
            OwnerRefusal: it is not one that runs may read.
            OSError: it cannot be opened.
        """
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
        """Files and folders that together are what runs may read: a folder in which something is closed is its parts.

        What comes into such a folder later is in none of them.
        """
        return tuple(way for each in self.below for way in self._open_parts(Path(each)))

    def _open_parts(self, path: Path) -> list[Path]:
        if any(path.is_relative_to(each) for each in self.never):
            return []
        if not any(Path(each).is_relative_to(path) for each in self.never):
            return [path]
        parts = [each for each in sorted(path.iterdir()) if not each.is_symlink()]  # a link may lead to what is closed
        return [part for each in parts for part in self._open_parts(each)]

    def check_names(self) -> None:
        """See that no closed file has a second name (hard link) below what runs may read.

        Raises:
            OwnerRefusal: one has.
        """
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
        """The data folder that a path leads into, and the path without links."""
        try:
            found = Path(path).resolve()
        except (OSError, ValueError, RuntimeError):  # a circle of links, or no path at all
            raise _refusal(path) from None
        folder = next((each for each in self.below if found.is_relative_to(each)), None)
        if folder is None or any(found.is_relative_to(each) for each in (*self.never, *SYSTEM)):
            raise _refusal(path)
        return (str(found.parent) if folder == str(found) else folder), found

    def _closed(self) -> frozenset[_Place]:
        """Of the closed files and folders themselves, so that another way to one (a mount) is none."""
        return frozenset(place for each in self.never if (place := _look(Path(each))) is not None)


def open_data(path: str | Path) -> BinaryIO:
    """A file that a run names, to read; within the fence, where this process has an owner.

    Raises:
        OwnerRefusal: it is not one that runs may read.
        OSError: it cannot be opened.
    """
    fence = fence_here()
    return Path(path).open("rb") if fence is None else fence.open(path)


def fence_here() -> Fence | None:
    """The fence of this process; None for that of an emulated silo, and at whoever tries something out."""
    text = os.environ.get(ALLOWED)
    return _fence(text) if text else None


@lru_cache(maxsize=2)
def _fence(text: str) -> Fence | None:
    allowed = json.loads(text)
    below, never = allowed.get("data"), allowed.get("never") or ()
    return None if below is None else Fence(tuple(below), tuple(never))


def _walk(folder: str, parts: tuple[str, ...], closed: frozenset[_Place], path: str | Path) -> int:
    """Open a file part by part below a folder, over no link; returns its descriptor."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(folder, flags | os.O_DIRECTORY)
    try:
        for last, part in enumerate(parts, start=1 - len(parts)):
            # Not to wait for a writer, where it is a pipe.
            more = os.O_NONBLOCK if last == 0 else os.O_DIRECTORY
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
    """Of all files in closed folders, looked at anew each second."""
    return frozenset(place for path in _paths_in(never) if (place := _look(path)) is not None)


def _paths_in(roots: tuple[str, ...]) -> Iterator[Path]:
    """All files in folders."""
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
    return OwnerRefusal("task", f"{path} is not where this silo's owner allows runs to read", remedy)
