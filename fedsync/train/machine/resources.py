"""Resources available to a trainer: load of other processes, memory, and limits of control groups (version 2).

Every source is optional; sources that the system lacks are left out.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_TICK_S = 0.01
"""Resolution of Linux's processor time [s]."""


def machine_busy_s() -> float:
    """Processor seconds of the machine since boot, including other guests of a hypervisor; `OSError` without Linux."""
    user, nice, system, _idle, _iowait, *interrupts, stolen = _words("/proc/stat")[1:9]
    return sum(map(int, (user, nice, system, *interrupts, stolen))) * _TICK_S


def machine_memory_share() -> float:
    """Share of the machine's memory in use, 0..1; `OSError` without Linux."""
    words = _words("/proc/meminfo")
    return 1.0 - int(words[words.index("MemAvailable:") + 1]) / int(words[words.index("MemTotal:") + 1])


def own_memory_bytes() -> int:
    try:
        return int(_words(f"/proc/{os.getpid()}/statm")[1]) * mmap.PAGESIZE
    except OSError:
        return 0


def _words(path: str) -> list[str]:
    with open(path, encoding="ascii") as file:  # noqa: PTH123  # read many times a second
        return file.read(512).split()


def allowed_processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class _Counters:
    """Counter values at one moment [s], and of each control group the processors allowed and the seconds used."""

    at_s: float
    own_s: float
    busy_s: float | None
    quotas: tuple[tuple[float | None, float | None], ...]


class Resources:
    """Reader of the machine's load for a silo's reports: means since the previous reading.

    The share of processors available to the trainer is the least of

    - ``(allowed - others) / nominal``: others is the busy time per second of the machine's processors minus this
      process's own time, spread evenly over the processors;
    - ``(quota - others in the group) / nominal`` for every control group with a quota;

    where nominal is the number of processors the process may use: its affinity, or the tightest quota at the start.
    1 means an otherwise idle machine: the trainer's own load counts as available to the trainer. Memory pressure is
    the share in use of the machine's memory or of a control group's limit, whichever is larger. Processor time has a
    resolution of 10 ms: one reading over 50 ms is coarse, the mean of several is not.

    Args:
        root: parent folder of ``proc`` and ``sys``.
        busy_s: processor seconds of all processors.
        own_s: processor seconds of this process.
        used: share of the machine's memory in use, 0..1.
        allowed: number of processors that this process may run on.
        processors: number of processors of the machine.
    """

    def __init__(
        self,
        root: Path = Path("/"),
        busy_s: Callable[[], float] = machine_busy_s,
        own_s: Callable[[], float] = time.process_time,
        used: Callable[[], float] = machine_memory_share,
        allowed: int | None = None,
        processors: int | None = None,
    ) -> None:
        self._busy_s, self._own_s, self._used = busy_s, own_s, used
        self._allowed = allowed or allowed_processors()
        self._processors = max(processors or os.cpu_count() or 1, self._allowed)
        self._quotas, self._limits = find_limits(root)
        quotas = [quota for quota in (limit.processors() for limit in self._quotas) if quota is not None]
        self._nominal = min([float(self._allowed), *quotas])
        self._before: _Counters | None = None
        # Ticks can make the load of others negative; the deficit is carried over to the next readings.
        self._owed_s = 0.0

    def begin(self, now_s: float) -> None:
        """Restart the measurement at ``now_s``, the reading of any clock [s]."""
        self._before, self._owed_s = self._count(now_s), 0.0

    def read(self, now_s: float) -> tuple[float | None, float | None]:
        """Return processor share and memory pressure, 0..1, since the last call or `begin`; None if unknown."""
        before, after = self._before, self._count(now_s)
        self._before, used = after, _attempt(self._used)
        shares = [used, *(limit.share(at_least=used or 0.0) for limit in self._limits)]
        memory = max((min(max(share, 0.0), 1.0) for share in shares if share is not None), default=None)
        if before is None or after.at_s <= before.at_s:
            return None, memory
        return self._available(before, after, after.at_s - before.at_s), memory

    def _count(self, now_s: float) -> _Counters:
        quotas = tuple((limit.processors(), limit.used_s()) for limit in self._quotas)
        return _Counters(now_s, self._own_s(), _attempt(self._busy_s), quotas)

    def _available(self, before: _Counters, after: _Counters, seconds: float) -> float | None:
        own_s = after.own_s - before.own_s
        found = []
        if before.busy_s is not None and after.busy_s is not None:
            others_s = after.busy_s - before.busy_s - own_s + self._owed_s
            self._owed_s = max(min(others_s, 0.0), -_TICK_S * self._processors)
            found.append(self._allowed * (1 - max(others_s, 0.0) / seconds / self._processors))
        for (_, used_before), (quota, used_after) in zip(before.quotas, after.quotas, strict=True):
            if quota is not None and used_before is not None and used_after is not None:
                found.append(quota - max(used_after - used_before - own_s, 0.0) / seconds)
        return min(max(min(found) / self._nominal, 0.0), 1.0) if found else None


def _attempt(read: Callable[[], float]) -> float | None:
    try:
        return read()
    except OSError:
        return None


@dataclass(frozen=True, slots=True)
class CpuLimit:
    """Processor quota of the control group at ``folder``."""

    folder: Path

    def processors(self) -> float | None:
        """Number of processors that the group may keep busy, or None without a quota."""
        match [_number(word) for word in _text(self.folder / "cpu.max").split()]:
            case [float(quota), float(period)] if quota > 0 and period > 0:
                return quota / period
        return None

    def used_s(self) -> float | None:
        used = _entry(self.folder / "cpu.stat", "usage_usec")
        return None if used is None else used / 1e6


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Memory limit of the control group at ``folder``."""

    folder: Path

    def total(self) -> float | None:
        """Limit [bytes], or None without a limit."""
        return _number(_text(self.folder / "memory.max"))

    def share(self, at_least: float = 0.0) -> float | None:
        """Share of the limit in use, or None without a limit.

        File cache, which the kernel would drop first, does not count, but is read only if the share exceeds
        ``at_least``.
        """
        limit, used = self.total(), _number(_text(self.folder / "memory.current"))
        if limit is None or used is None or limit <= 0:
            return None
        if used <= at_least * limit:
            return used / limit
        return max(0.0, used - (_entry(self.folder / "memory.stat", "inactive_file") or 0.0)) / limit


def find_limits(root: Path = Path("/")) -> tuple[tuple[CpuLimit, ...], tuple[MemoryLimit, ...]]:
    """Return the limits of this process's control groups, innermost first; ``root`` contains ``proc`` and ``sys``."""
    groups = list(_groups(root))
    cpu = (limit for limit in map(CpuLimit, groups) if limit.processors() is not None)
    memory = (limit for limit in map(MemoryLimit, groups) if limit.share() is not None)
    return tuple(cpu), tuple(memory)


def _groups(root: Path) -> Iterator[Path]:
    """Yield folders of this process's group and its parents. In a container, the mount is the container's own group."""
    lines = _text(root / "proc/self/cgroup").splitlines()
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


def _text(path: Path) -> str:
    """Content of a small kernel file; empty if the file cannot be read."""
    try:
        return path.read_text("ascii", "replace")
    except OSError:
        return ""


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _entry(path: Path, key: str) -> float | None:
    """Number after ``key`` in a file of ``key value`` lines."""
    pairs = (line.partition(" ") for line in _text(path).splitlines())
    return next((_number(value) for word, _, value in pairs if word == key), None)
