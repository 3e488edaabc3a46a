"""The limits that Linux control groups (version 2) set to this process. Elsewhere there are none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

_MOST_BYTES = 16_384
"""Of a file; longer ones begin with what is wanted."""


@dataclass(frozen=True, slots=True)
class CpuLimit:
    """A group's processor quota; ``folder`` is the group's."""

    folder: Path

    def processors(self) -> float | None:
        """How many processors the group may keep busy, or None without a quota."""
        numbers = [_number(word) for word in (read_text(self.folder / "cpu.max") or "").split()]
        match numbers:
            case [float(quota), float(period)] if quota > 0 and period > 0:
                return quota / period
            case _:
                return None

    def used_s(self) -> float | None:
        """Processor seconds that the group has used, or None where they are not counted."""
        used = _entry(self.folder / "cpu.stat", "usage_usec")
        return None if used is None else used / 1e6


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A group's memory limit; ``folder`` is the group's."""

    folder: Path

    def total(self) -> float | None:
        """The limit [bytes], or None without one."""
        return _number(read_text(self.folder / "memory.max"))

    def share(self, at_least: float = 0.0) -> float | None:
        """Share of the limit in use, or None without a limit.

        File cache that the kernel would drop first does not count. That takes a look into a longer file, so
        a share that is no larger than ``at_least`` with the cache is returned with it.
        """
        limit = self.total()
        used = _number(read_text(self.folder / "memory.current"))
        if limit is None or used is None or limit <= 0:
            return None
        if used <= at_least * limit:
            return used / limit
        return max(0.0, used - (_entry(self.folder / "memory.stat", "inactive_file") or 0.0)) / limit


@dataclass(frozen=True, slots=True)
class Limits:
    """All limits around this process.

    Args:
        cpu: quotas, the innermost group's first.
        memory: memory limits, likewise.
        home: folder of the process's own group, if there is one.
    """

    cpu: tuple[CpuLimit, ...] = ()
    memory: tuple[MemoryLimit, ...] = ()
    home: Path | None = None


def find_limits(root: Path = Path("/")) -> Limits:
    """The groups with a limit that this process is in.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    groups = list(_groups(root))
    cpu = (limit for limit in map(CpuLimit, groups) if limit.processors() is not None)
    memory = (limit for limit in map(MemoryLimit, groups) if limit.share() is not None)
    return Limits(tuple(cpu), tuple(memory), groups[0] if groups else None)


def _groups(root: Path) -> Iterator[Path]:
    """Folders of this process's group and of those around it. A container sees its own group as the mount."""
    lines = (read_text(root / "proc/self/cgroup") or "").splitlines()
    path = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), None)
    # Mounted alone, or beside version 1.
    mounts = (root / "sys/fs/cgroup" / name for name in ("", "unified"))
    mount = next((mount for mount in mounts if (mount / "cgroup.controllers").is_file()), None)
    if path is None or mount is None:
        return
    inside = Path(path.strip("/"))
    for place in (inside, *inside.parents):
        if ".." not in place.parts and (mount / place).is_dir():
            yield mount / place


def read_text(path: Path) -> str | None:
    """What a small file of the kernel's holds, or None if it cannot be read.

    Such files are read many times a second, so they stay open: the kernel makes anew what is read at their beginning.
    """
    try:
        return os.pread(_opened(path).descriptor, _MOST_BYTES, 0).decode("ascii", "replace")
    except OSError:
        return None


class _OpenFile:
    """A file that is open for as long as this object is."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


_opened = lru_cache(maxsize=32)(_OpenFile)


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _entry(path: Path, key: str) -> float | None:
    """The number behind a word at the beginning of a line."""
    for line in (read_text(path) or "").splitlines():
        word, _, value = line.partition(" ")
        if word == key:
            return _number(value)
    return None
