"""Resources available to a trainer: load of other processes, limits, and stalls counted by the kernel.

Every source is optional; sources that the system lacks are left out.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import psutil

_STAT, _MEMINFO = Path("/proc/stat"), Path("/proc/meminfo")
"""Linux's files, read here because psutil takes four times as long; psutil serves other systems."""

_TICK_S = 0.01
"""Resolution of Linux's processor time [s]."""


def machine_busy_s() -> float:
    """Processor seconds of the machine since boot, including other guests of a hypervisor."""
    words = (read_text(_STAT) or "").split(maxsplit=9)
    if len(words) > 8 and words[0] == "cpu":
        user, nice, system, _idle, _iowait, *interrupts, stolen = map(int, words[1:9])
        return (user + nice + system + sum(interrupts) + stolen) * _TICK_S
    times = psutil.cpu_times()._asdict()
    # `user` and `nice` already include the time of guests.
    return float(sum(times.values()) - sum(times.get(name, 0.0) for name in ("idle", "iowait", "guest", "guest_nice")))


def machine_memory_share() -> float:
    words = (read_text(_MEMINFO) or "").split(maxsplit=8)
    if words[:1] == ["MemTotal:"] and words[6:7] == ["MemAvailable:"]:
        return 1.0 - int(words[7]) / int(words[1])
    return float(psutil.virtual_memory().percent) / 100.0


def own_memory_bytes() -> int:
    words = (read_text(Path(f"/proc/{os.getpid()}/statm")) or "").split(maxsplit=2)
    if len(words) > 1:
        return int(words[1]) * mmap.PAGESIZE
    return int(psutil.Process().memory_info().rss)


def allowed_processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def stalled_s(path: Path | None, kind: str) -> float | None:
    """Stalled seconds since boot from a kernel's pressure file, kind ``some`` or ``full``; None without a count."""
    for line in ((path and read_text(path)) or "").splitlines():
        if line.startswith(kind):
            total = line.rpartition("total=")[2]
            return int(total) / 1e6 if total.isdecimal() else None
    return None


@dataclass(frozen=True, slots=True)
class _Counters:
    """Counter values at one moment, all in seconds."""

    at_s: float
    own_s: float
    busy_s: float | None
    quotas: tuple[tuple[float | None, float | None], ...]  # processors allowed and seconds used, per group
    cpu_stalled_s: float | None
    memory_stalled_s: float | None


class Resources:
    """Reader of the machine's load for a silo's reports: means since the previous reading.

    The share of processors available to the trainer is the least of

    - ``(allowed - others) / nominal``: others is the busy time per second of the machine's processors minus this
      process's own time, spread evenly over the processors;
    - ``(quota - others in the group) / nominal`` for every control group with a quota;
    - 1 minus the share of time in which the process's own control group had no processor at all
      (the kernel's ``cpu.pressure``, full)

    where nominal is the number of processors the process may use: its affinity, or the tightest quota at the start.
    1 means an otherwise idle machine: the trainer's own load counts as available to the trainer.

    Memory pressure is ``1 - (1 - used) (1 - stalled)``. ``used`` is the share in use of the machine's memory or of a
    control group's limit, whichever is larger. ``stalled`` is the share of time in which some task waited for memory
    (``memory.pressure``, some; of the own control group, or else of the machine).

    A reading takes tens of microseconds. Processor time has a resolution of 10 ms: one reading over 50 ms is coarse,
    the mean of several is not.

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
        limits = find_limits(root)
        self._quotas, self._limits = limits.cpu, limits.memory
        quotas = [quota for quota in (limit.processors() for limit in self._quotas) if quota is not None]
        self._nominal = min([float(self._allowed), *quotas])
        home = limits.home
        self._cpu_pressure = None if home is None else home / "cpu.pressure"
        own = None if home is None else home / "memory.pressure"
        counted = stalled_s(own, "some") is not None
        self._memory_pressure = own if counted else root / "proc/pressure/memory"
        self._before: _Counters | None = None
        # Ticks can make the load of others negative; the deficit is carried over to the next readings.
        self._owed_s = 0.0

    def begin(self, now_s: float) -> None:
        """Restart the measurement at ``now_s``, the reading of any clock [s]."""
        self._before, self._owed_s = self._count(now_s), 0.0

    def read(self, now_s: float) -> tuple[float | None, float | None]:
        """Return processor share and memory pressure, 0..1, since the last call or `begin`; None if unknown."""
        before, after = self._before, self._count(now_s)
        self._before = after
        used = self._memory_share()
        if before is None or after.at_s <= before.at_s:
            return None, used
        seconds = after.at_s - before.at_s
        stalled = _share(before.memory_stalled_s, after.memory_stalled_s, seconds) or 0.0
        return self._available(before, after, seconds), None if used is None else 1 - (1 - used) * (1 - stalled)

    def _count(self, now_s: float) -> _Counters:
        return _Counters(
            at_s=now_s,
            own_s=self._own_s(),
            busy_s=_attempt(self._busy_s),
            quotas=tuple((limit.processors(), limit.used_s()) for limit in self._quotas),
            cpu_stalled_s=stalled_s(self._cpu_pressure, "full"),
            memory_stalled_s=stalled_s(self._memory_pressure, "some"),
        )

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
        stalled = _share(before.cpu_stalled_s, after.cpu_stalled_s, seconds)
        if stalled is not None:
            found.append((1 - stalled) * self._nominal)
        return min(max(min(found) / self._nominal, 0.0), 1.0) if found else None

    def _memory_share(self) -> float | None:
        used = _attempt(self._used)
        for limit in self._limits:
            share = limit.share(at_least=used or 0.0)
            if share is not None:
                used = max(used or 0.0, share)
        return None if used is None else min(max(used, 0.0), 1.0)


def _attempt(read: Callable[[], float]) -> float | None:
    try:
        return read()
    except OSError:
        return None


def _share(before: float | None, after: float | None, seconds: float) -> float | None:
    if before is None or after is None:
        return None
    return min(max((after - before) / seconds, 0.0), 1.0)


_MOST_BYTES = 16_384
"""Bytes read per file; in longer files the entries we need come first."""


@dataclass(frozen=True, slots=True)
class CpuLimit:
    """Processor quota of the control group at ``folder``."""

    folder: Path

    def processors(self) -> float | None:
        numbers = [_number(word) for word in (read_text(self.folder / "cpu.max") or "").split()]
        match numbers:
            case [float(quota), float(period)] if quota > 0 and period > 0:
                return quota / period
            case _:
                return None

    def used_s(self) -> float | None:
        used = _entry(self.folder / "cpu.stat", "usage_usec")
        return None if used is None else used / 1e6


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Memory limit of the control group at ``folder``."""

    folder: Path

    def total(self) -> float | None:
        return _number(read_text(self.folder / "memory.max"))

    def share(self, at_least: float = 0.0) -> float | None:
        """Share of the limit in use, or None without a limit.

        File cache, which the kernel would drop first, does not count, but is read only if the share exceeds
        ``at_least``.
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
    """Return the content of a small kernel file, or None if the file cannot be read; kept open, as it is read often."""
    try:
        return os.pread(_opened(path).descriptor, _MOST_BYTES, 0).decode("ascii", "replace")
    except OSError:
        return None


class _OpenFile:
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
    for line in (read_text(path) or "").splitlines():
        word, _, value = line.partition(" ")
        if word == key:
            return _number(value)
    return None
