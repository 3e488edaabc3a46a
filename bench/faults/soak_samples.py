"""Memory and disk use of a federation of `bench/faults/long_soak.py` over time.

A killed process starts anew, so memory is shown by the process's age: commits of the run since it was first seen.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median

import psutil

from bench.faults.soak_federation import Federation

ROLES = {
    "trainer": "fedsync.silo.session.resident_trainer",
    "agent": "fedsync.silo.agent.agent",
    "SuperNode": "launch supernode",
    "ServerApp": "flwr-serverapp",
    "SuperLink": "launch superlink",
    "SuperExec": "launch superexec",
}
"""What stands in the command lines of processes that do not watch over others."""

SERVER_WATCH, SILO_WATCH = "fedsync server start", "fedsync silo start"


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at one process.

    Args:
        role: what it does.
        life: number of its process and when it began, by which it is known.
        commit: of the run, at this moment.
        age: commits since the process was first seen.
        age_s: seconds since it began.
        rss: resident memory [bytes].
        uss: memory that it shares with nobody [bytes]; grows when another process ends that shared some.
    """

    role: str
    life: str
    commit: int
    age: int
    age_s: float
    rss: int
    uss: int


@dataclass(slots=True)
class Sampler:
    """Looks at a federation from time to time.

    Args:
        federation: which.
        out: folder of the run's files, in it.
        memory: of each look at each process.
        disk: of each look: ``commit``, and bytes by `place`.
    """

    federation: Federation
    out: Path
    memory: list[Sample] = field(default_factory=list)
    disk: list[dict[str, int]] = field(default_factory=list)
    _first: dict[str, int] = field(default_factory=dict)

    def look(self, commit: int, now_s: float) -> None:
        """Sample all; ``now_s`` is the time of day."""
        for role, process in self._processes():
            with contextlib.suppress(psutil.Error):
                born_s, told = process.create_time(), process.memory_full_info()
                life = f"{process.pid}@{born_s:.2f}"
                age = commit - self._first.setdefault(life, commit)
                self.memory.append(Sample(role, life, commit, age, now_s - born_s, told.rss, told.uss))
        self.disk.append({"commit": commit, **self._bytes()})

    def _processes(self) -> list[tuple[str, psutil.Process]]:
        found = []
        for process in (*self.federation.processes(""), *self.federation.supervisors()):
            with contextlib.suppress(psutil.Error):
                found.append((role_of(" ".join(process.cmdline())), process))
        return found

    def _bytes(self) -> dict[str, int]:
        """Of all files of the federation, by `place`."""
        found: defaultdict[str, int] = defaultdict(int)
        home, run = self.federation.folder, self.out.relative_to(self.federation.folder)
        for folder, _, names in os.walk(home):
            for name in names:
                path = Path(folder) / name
                with contextlib.suppress(OSError):  # it went meanwhile
                    found[place(path.relative_to(home), run)] += path.lstat().st_size
        return dict(sorted(found.items()))


def role_of(command: str) -> str:
    """What a process does, by its command line."""
    for role, word in (*ROLES.items(), (SERVER_WATCH, "server start"), (SILO_WATCH, "silo start")):
        if word in command:
            return role
    return "other"


def place(path: Path, run: Path) -> str:
    """What a file of the federation counts as; both below its folder."""
    if path.is_relative_to(run):
        name = path.relative_to(run).parts[0]
        return f"run: {name}" if name in ("journal.jsonl", "rounds.jsonl", "checkpoints") else "run: all else"
    top = path.parts[0]
    if path.suffix in (".out", ".log") or "logs" in path.parts:
        return "server: logs" if top.startswith("server") else "silos: logs"
    if top == "server":
        return "server: database" if path.name.startswith("superlink.db") else "server: all else"
    if top[:1] == "s" and top[1:].isdigit():
        return "silos: audit log" if "audit" in str(path.relative_to(top)) else "silos: all else"
    return "keys and certificates"


def slope(points: Iterable[Sequence[tuple[float, float]]]) -> float:
    """Of a straight line through each of several series, the same for all, by least squares; 0 where none has two x."""
    up, across = 0.0, 0.0
    for series in points:
        x0, y0 = mean(x for x, _ in series), mean(y for _, y in series)
        up += sum((x - x0) * (y - y0) for x, y in series)
        across += sum((x - x0) ** 2 for x, _ in series)
    return up / across if across else 0.0


def memory_rows(samples: Sequence[Sample], warm: int) -> list[dict[str, float | str]]:
    """By role, what memory does once a process has its first ``warm`` commits behind it; memory in MiB.

    ``lives`` counts processes that came so far, ``oldest`` is the age of the oldest [commits]. ``rss`` is the median
    then, ``rss_end`` at the last look at each, and ``most`` the largest growth of any in between. ``rss_slope`` and
    ``uss_slope`` are growth in 1,000 commits by `slope`. ``first`` and ``last`` are medians of ``rss`` over the first
    and the last third of the lives: whether a process that starts late in a run is larger.
    """
    lives: defaultdict[tuple[str, str], list[Sample]] = defaultdict(list)
    for sample in samples:
        if sample.age >= warm:
            lives[sample.role, sample.life].append(sample)
    rows: list[dict[str, float | str]] = []
    for role in dict.fromkeys(sample.role for sample in samples):
        of = [each for (name, _), each in lives.items() if name == role]
        if not of:
            continue
        begins, ends = [each[0].rss / 2**20 for each in of], [each[-1].rss / 2**20 for each in of]
        third = -(-len(of) // 3)
        rows.append(
            {
                "process": role,
                "lives": len(of),
                "oldest": max(each[-1].age for each in of),
                "rss": median(begins),
                "rss_end": median(ends),
                "most": max(end - begin for begin, end in zip(begins, ends, strict=True)),
                "rss_slope": 1000 * slope([[(each.age, each.rss / 2**20) for each in one] for one in of]),
                "uss_slope": 1000 * slope([[(each.age, each.uss / 2**20) for each in one] for one in of]),
                "first": median(begins[:third]),
                "last": median(begins[-third:]),
            }
        )
    return rows


def disk_rows(looks: Sequence[dict[str, int]]) -> list[dict[str, float | str]]:
    """By place: bytes at a fifth of the run, at its half and its end, and how many a commit came in the second half."""
    rows: list[dict[str, float | str]] = []
    if len(looks) < 3:
        return rows
    fifth, half, end = looks[len(looks) // 5], looks[len(looks) // 2], looks[-1]
    commits = max(end["commit"] - half["commit"], 1)
    for name in sorted(set().union(*looks) - {"commit"}):
        at = [look.get(name, 0) for look in (fifth, half, end)]
        rows.append({"files": name, "fifth": at[0], "half": at[1], "end": at[2], "a_commit": (at[2] - at[1]) / commits})
    return rows
