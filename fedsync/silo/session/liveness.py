"""Detection of hung trainers for waiting clients, and the trainers' states for the health file.

A trainer answers probes by a separate thread, also while it loads and trains. So the duration of an order says nothing.
A trainer is hung if it misses several probes in a row and uses no processor time meanwhile. It is stopped, or waits for
a disk or a device that is gone. A silent trainer that uses processor time may be in a long computation that blocks all
other threads. Such a busy trainer is never treated as hung.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import psutil

from fedsync.common import foreign
from fedsync.silo.protocol import SOCKET, Ping, TrainerState
from fedsync.silo.session.connection import call, hang_up, receive, send
from fedsync.silo.session.trainer_folder import tenant

logger = foreign.logger(__name__)

PROBE_S = 5.0
"""Timeout of a probe, and pause between two probes [s]."""

_PROBES = 6
"""Failed probes in a row after which a trainer counts as hung; together a minute."""

_END_S = 20.0


@dataclass(frozen=True, slots=True)
class Signs:
    """Signs of life of a trainer: processor time at the last probe [s], and failed probes in a row."""

    cpu_s: float = -1.0
    silent: int = 0

    def after(self, *, answered: bool, cpu_s: float) -> Signs:
        """Add a probe; silence counts in probes, not in time, so that a suspended machine does no harm."""
        return Signs(cpu_s, 0 if answered or cpu_s > self.cpu_s else self.silent + 1)

    @property
    def hangs(self) -> bool:
        return self.silent >= _PROBES


def probe(folder: Path) -> TrainerState | None:
    """Return the trainer's own state; None without an answer."""
    try:
        connection = call(folder / SOCKET)
        if connection is None:
            return None
        with connection:
            send(connection, Ping())
            state = receive(connection)[0] if connection.poll(PROBE_S) else None
            return state if isinstance(state, TrainerState) else None
    except (OSError, EOFError):
        return None


def end(folder: Path, pid: int) -> bool:
    """Kill the trainer that holds a folder; return whether it is gone within 20 s."""
    # The lock may go before the socket closes, and a caller in between would connect to the dead trainer. The trainer
    # holds the folder, so no other trainer's socket is there.
    with contextlib.suppress(OSError):
        (folder / SOCKET).unlink()
    with contextlib.suppress(psutil.Error):
        if pid > 0:
            psutil.Process(pid).kill()
    end_s = time.monotonic() + _END_S
    # Its id may be a zombie's while its threads still end; the lock is free once all threads have ended.
    while tenant(folder) == pid:
        if time.monotonic() > end_s:
            return False
        time.sleep(0.02)
    return True


class LivenessWatch:
    """Context manager that ends a hung trainer, so that a client's wait for it ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._found: str | None = None

    def __enter__(self) -> Self:
        threading.Thread(target=self._look, daemon=True).start()
        return self

    def __exit__(self, *what: object) -> None:
        with self._lock:
            self._over.set()
            if self._connection is not None:
                self._connection.close()

    def on(self, connection: Connection) -> Connection:
        """Register a connection, to close it at the end, or earlier on a hang, because the trainer may survive."""
        self._connection = connection
        return connection

    def found(self) -> str | None:
        """Return the trainer's fault and the reaction; None without a fault. Waits until the reaction is complete."""
        with self._lock:
            return self._found

    def _look(self) -> None:
        pid, signs = None, Signs()
        while not self._over.wait(PROBE_S):
            before, pid = pid, tenant(self._folder)
            if pid is None:
                continue
            signs = (signs if pid == before else Signs()).after(
                answered=probe(self._folder) is not None, cpu_s=_processor_s(pid)
            )
            if signs.hangs and tenant(self._folder) == pid:
                self._end(pid)
                signs = Signs()

    def _end(self, pid: int) -> None:
        with self._lock:
            if self._over.is_set():
                return
            logger.warning("the trainer in %s hangs: process %d is ended", self._folder, pid)
            gone = "was ended. The next message starts another"
            self._found = (
                f"hung, process {pid}, and {gone if end(self._folder, pid) else 'cannot be ended: restart the machine'}"
            )
            if self._connection is not None:
                with contextlib.suppress(OSError):  # The other side has closed the connection already.
                    hang_up(self._connection)


def _processor_s(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


@dataclass(frozen=True, slots=True)
class Seen:
    """Trainer in the health file; ``state`` as in `TrainerState`, or ``silent`` where the trainer does not answer."""

    pid: int
    state: str
    since: str


class Trainers:
    """Monitor of the trainers below a silo's folder ``root``, for the health file; runs in its own thread."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._seen: dict[str, Seen] = {}

    def watch(self, stop: threading.Event) -> None:
        while not stop.wait(PROBE_S):
            self.look()

    def look(self) -> None:
        """Probe each trainer once; blocks up to `PROBE_S` for each silent trainer."""
        seen: dict[str, Seen] = {}
        for folder in sorted(self._root.glob("*")):
            pid = tenant(folder)
            if pid is not None:
                seen[folder.name] = self._one(folder, pid)
        self._seen = seen

    def told(self) -> dict[str, Any]:
        """Return the last seen states for the health file, by the names of the trainers' folders."""
        return {"trainers": {name: asdict(seen) for name, seen in self._seen.items()}}

    @property
    def working(self) -> bool:
        """Whether any trainer had an order in work at the last look."""
        return any(seen.state == "working" for seen in self._seen.values())

    def _one(self, folder: Path, pid: int) -> Seen:
        answer = probe(folder)
        if answer is not None:
            return Seen(pid, answer.state, answer.since)
        silent = Seen(pid, "silent", datetime.now(UTC).isoformat(timespec="seconds"))
        before = self._seen.get(folder.name)
        return silent if before is None or replace(before, since=silent.since) != silent else before
