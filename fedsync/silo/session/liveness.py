"""Finds out whether a resident trainer hangs, for those who wait for it, and what it does, for the health file.

A trainer answers a probe at any time, by a thread of its own, while it loads and while it trains; so how long an order
takes says nothing. One that answers none of several in a row, and takes no processor time meanwhile, hangs: it is
stopped, or waits for a disk or a device that is gone. One that takes processor time may be in the midst of a long
computation that lets no other thread run, and is let be.
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
"""How long a probe waits for its answer, and pause between two [s]."""

_PROBES = 6
"""Probes in a row without a sign of life, after which a trainer counts as hanging: a minute."""

_END_S = 20.0


@dataclass(frozen=True, slots=True)
class Signs:
    """What has been seen of a trainer's life.

    Args:
        cpu_s: processor time that it had taken at the last probe [s].
        silent: probes in a row without a sign of life.
    """

    cpu_s: float = -1.0
    silent: int = 0

    def after(self, *, answered: bool, cpu_s: float) -> Signs:
        """With one more probe; a probe, not a time, so that a machine that was asleep does no harm."""
        return Signs(cpu_s, 0 if answered or cpu_s > self.cpu_s else self.silent + 1)

    @property
    def hangs(self) -> bool:
        """Whether nothing is to be hoped for."""
        return self.silent >= _PROBES


def probe(folder: Path) -> TrainerState | None:
    """What the trainer in a folder says of itself; None if it says nothing."""
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
    """Kill the trainer that has a folder; returns whether it is gone, after a while at the latest."""
    # The lock may go before the socket closes: whoever comes in between would call the dead one. It has the folder, so
    # there is no other's socket.
    with contextlib.suppress(OSError):
        (folder / SOCKET).unlink()
    with contextlib.suppress(psutil.Error):
        if pid > 0:
            psutil.Process(pid).kill()
    end_s = time.monotonic() + _END_S
    # Its number may be a zombie's while threads of it still end: the folder is free once all have.
    while tenant(folder) == pid:
        if time.monotonic() > end_s:
            return False
        time.sleep(0.02)
    return True


class LivenessWatch:
    """While one waits for the trainer in a folder, ends it if it hangs, so that the waiting ends. A context manager.

    Args:
        folder: of the trainer.
    """

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
        """Take a connection, to close it in the end, and before if the trainer hangs: it may not even die."""
        self._connection = connection
        return connection

    def found(self) -> str | None:
        """What was wrong with the trainer, and what was done; None if nothing was. Waits until it is done."""
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
                with contextlib.suppress(OSError):  # The other side has gone before.
                    hang_up(self._connection)


def _processor_s(pid: int) -> float:
    """Processor time that a process has taken [s]."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


@dataclass(frozen=True, slots=True)
class Seen:
    """A trainer, as the health file shows it.

    Args:
        pid: number of its process.
        state: ``loading``, ``idle``, ``working``, ``failed``; ``silent`` where it does not answer.
        since: in this state since then, ISO 8601.
    """

    pid: int
    state: str
    since: str


class Trainers:
    """Looks now and then at the trainers in a silo's folder, by a thread of its own, for the health file.

    Args:
        root: folder of trainers' folders.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._seen: dict[str, Seen] = {}

    def watch(self, stop: threading.Event) -> None:
        """Look until ``stop`` is set."""
        while not stop.wait(PROBE_S):
            self.look()

    def look(self) -> None:
        """Look at each trainer once; takes a while where one does not answer."""
        seen: dict[str, Seen] = {}
        for folder in sorted(self._root.glob("*")):
            pid = tenant(folder)
            if pid is not None:
                seen[folder.name] = self._one(folder, pid)
        self._seen = seen

    def told(self) -> dict[str, Any]:
        """For the health file: what was seen last, by the names of the trainers' folders."""
        return {"trainers": {name: asdict(seen) for name, seen in self._seen.items()}}

    @property
    def working(self) -> bool:
        """Whether any of them had an order in work when it was looked at last."""
        return any(seen.state == "working" for seen in self._seen.values())

    def _one(self, folder: Path, pid: int) -> Seen:
        answer = probe(folder)
        if answer is not None:
            return Seen(pid, answer.state, answer.since)
        silent = Seen(pid, "silent", datetime.now(UTC).isoformat(timespec="seconds"))
        before = self._seen.get(folder.name)
        return silent if before is None or replace(before, since=silent.since) != silent else before
