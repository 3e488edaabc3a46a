"""Resource limits that Linux control groups (version 2) set for this process; empty on other systems."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

_MOST_BYTES = 16_384
"""Bytes read per file; in longer files the entries we need come first."""


@dataclass(frozen=True, slots=True)
class CpuLimit:
    """Processor quota of the control group at ``folder``."""

    folder: Path

    def processors(self) -> float | None:
        """Number of processors that the group may keep busy, or None without a quota."""
        numbers = [_number(word) for word in (read_text(self.folder / "cpu.max") or "").split()]
        match numbers:
            case [float(quota), float(period)] if quota > 0 and period > 0:
                return quota / period
            case _:
                return None

    def used_s(self) -> float | None:
        """Processor seconds that the group has used, or None where the kernel does not count them."""
        used = _entry(self.folder / "cpu.stat", "usage_usec")
        return None if used is None else used / 1e6


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Memory limit of the control group at ``folder``."""

    folder: Path

    def total(self) -> float | None:
        """Return the limit [bytes], or None without a limit."""
        return _number(read_text(self.folder / "memory.max"))

    def share(self, at_least: float = 0.0) -> float | None:
        """Share of the limit in use, or None without a limit.

        File cache that the kernel would drop first does not count. The cache size is in a longer file, which is
        read only if the share with cache exceeds ``at_least``; otherwise the share includes the cache.
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
    """All control-group limits that apply to this process, innermost group first; ``home``: its own group."""

    cpu: tuple[CpuLimit, ...] = ()
    memory: tuple[MemoryLimit, ...] = ()
    home: Path | None = None


def find_limits(root: Path = Path("/")) -> Limits:
    """Find the control groups of this process that set a limit; ``root`` contains ``proc`` and ``sys``."""
    groups = list(_groups(root))
    cpu = (limit for limit in map(CpuLimit, groups) if limit.processors() is not None)
    memory = (limit for limit in map(MemoryLimit, groups) if limit.share() is not None)
    return Limits(tuple(cpu), tuple(memory), groups[0] if groups else None)


def _groups(root: Path) -> Iterator[Path]:
    """Yield folders of this process's group and its parents. In a container, the mount is the container's own group."""
    lines = (read_text(root / "proc/self/cgroup") or "").splitlines()
    path = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), None)
    # Version 2 is mounted at the root, or in "unified" beside version 1.
    mounts = (root / "sys/fs/cgroup" / name for name in ("", "unified"))
    mount = next((mount for mount in mounts if (mount / "cgroup.controllers").is_file()), None)
    if path is None or mount is None:
        return
    inside = Path(path.strip("/"))
    for place in (inside, *inside.parents):
        if ".." not in place.parts and (mount / place).is_dir():
            yield mount / place


def read_text(path: Path) -> str | None:
    """Return the content of a small kernel file, or None if the file cannot be read.

    Kernel files are read many times a second, so they stay open: the kernel regenerates the content at each read
    from position 0.
    """
    try:
        return os.pread(_opened(path).descriptor, _MOST_BYTES, 0).decode("ascii", "replace")
    except OSError:
        return None


class _OpenFile:
    """File descriptor that is closed together with this object."""

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
    """Return the number after ``key`` in a file of ``key value`` lines."""
    for line in (read_text(path) or "").splitlines():
        word, _, value = line.partition(" ")
        if word == key:
            return _number(value)
    return None
