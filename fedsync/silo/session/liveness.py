"""Detection of hung trainer processes, by waiting clients and by the trainers themselves; states for health files.

A trainer answers probes by a separate thread, also while it loads and trains. It is hung if it misses several probes in
a row and uses no processor time meanwhile. For example, it waits for a disk or a device that is gone. A trainer that
answers may still have a thread that waits for ever: then no local step ends, and neither the trainer nor its child
processes use processor time. A trainer that uses processor time is never treated as hung, even if a step takes long. A
thread cannot be killed, so the whole trainer reports the error and ends; the next message starts another trainer.

A trainer watches its own work by this table:

| work | counts as hung after |
|---|---|
| the shipped loop, or an evaluation by it | ten minutes without a sign of life |
| a loop of the user's own, which may wait for another machine; an emulated machine, which sleeps | never |
| any of these, if the server has abandoned the order, or another order waits for its end | a minute |
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import psutil

from fedsync.common import foreign
from fedsync.common.errors import Hanging
from fedsync.common.locks import wait_until
from fedsync.silo.protocol import SOCKET, Ping, TrainerState
from fedsync.silo.session.trainer_folder import tenant
from fedsync.silo.session.trainer_socket import call, hang_up, receive, send

logger = foreign.logger(__name__)

PROBE_S = 5.0  # timeout of a probe, and pause between two probes

_PROBES = 6  # failed probes in a row after which a trainer counts as hung; together a minute

_END_S = 20.0

LOOK_S = 5.0  # pause between two checks

PATIENCE_S = 600.0  # time without a sign of life after which the shipped loop counts as hung

UNWANTED_S = 60.0  # the same limit for work whose result nobody waits for

_LEAST_SHARE = 0.02  # share of a processor that counts as a sign of life; progress replies take less


@dataclass(frozen=True, slots=True)
class Signs:
    """Signs of life of a trainer: processor time at the last probe [s], and failed probes in a row."""

    cpu_s: float = -1.0
    silent: int = 0

    def after(self, *, answered: bool, cpu_s: float) -> Signs:
        """Add a probe; silence counts in probes, not in time, so that a suspended machine does no harm."""
        return Signs(cpu_s, 0 if answered or cpu_s > self.cpu_s else self.silent + 1)


def probe(folder: Path) -> TrainerState | None:
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
    # The lock may go before the socket closes, and a caller in between would connect to the dead trainer. The trainer
    # holds the folder, so no other trainer's socket is there.
    with contextlib.suppress(OSError):
        (folder / SOCKET).unlink()
    with contextlib.suppress(psutil.Error):
        if pid > 0:
            psutil.Process(pid).kill()
    # Its id may be a zombie's while its threads still end; the lock is free once all threads have ended.
    return wait_until(lambda: tenant(folder) != pid, _END_S, 0.02)


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
            if signs.silent >= _PROBES and tenant(self._folder) == pid:
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


class Trainers:
    """Monitor of the trainers below a silo's folder ``root``, for the health file; runs in its own thread. The file has
    process and state of each; the state is that of `TrainerState`, or ``silent`` where the trainer does not answer.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._seen: dict[str, dict[str, int | str]] = {}

    def watch(self, stop: threading.Event) -> None:
        while not stop.wait(PROBE_S):
            self.look()

    def look(self) -> None:
        """Probe each trainer once; blocks up to `PROBE_S` for each silent trainer."""
        seen: dict[str, dict[str, int | str]] = {}
        for folder in sorted(self._root.glob("*")):
            pid = tenant(folder)
            if pid is None:
                continue
            answer, before = probe(folder), self._seen.get(folder.name, {})
            state = "silent" if answer is None else answer.state
            since = datetime.now(UTC).isoformat(timespec="seconds") if answer is None else answer.since
            goes_on = answer is None and (before.get("pid"), before.get("state")) == (pid, state)
            seen[folder.name] = before if goes_on else {"pid": pid, "state": state, "since": since}
        self._seen = seen

    def told(self) -> dict[str, Any]:
        return {"trainers": self._seen}

    @property
    def working(self) -> bool:
        return any(seen["state"] == "working" for seen in self._seen.values())


@dataclass(frozen=True, slots=True)
class StepSigns:
    """Signs of life of running work: steps and processor time [s] at the last check, and time without a sign [s]. As in
    `Signs`, silence counts in checks.
    """

    steps: int = -1
    cpu_s: float = 0.0
    still_s: float = 0.0

    def after(self, steps: int, cpu_s: float) -> StepSigns:
        # A child process that ends takes its processor time out of the sum, so less time is no sign of life either.
        lives = steps != self.steps or cpu_s - self.cpu_s > _LEAST_SHARE * LOOK_S
        return StepSigns(steps, cpu_s, 0.0 if lives else self.still_s + LOOK_S)


@contextlib.contextmanager
def hang_watch(
    what: str,
    steps: Callable[[], int],
    unwanted: Callable[[], bool],
    found: Callable[[Hanging], None],
    where: Callable[[int], str],
    *,
    waits: bool,
) -> Iterator[None]:
    """Watch the work of this thread from another thread.

    ``unwanted`` returns whether nobody waits for the work. ``where`` returns the code line of a thread, for people.
    ``waits``: the work may wait for any length of time. ``found`` is called once, with the error, if the work hangs.
    """
    over, watched = threading.Event(), threading.get_ident()

    def look() -> None:
        signs = StepSigns()
        while not over.wait(LOOK_S):
            signs = signs.after(steps(), _group_processor_s())
            patience_s = UNWANTED_S if unwanted() else inf if waits else PATIENCE_S
            if signs.still_s >= patience_s:
                logger.warning("%s hangs here:", what)
                still = f"for {signs.still_s:.0f} s no step ended and no processor time was taken"
                then = "The trainer ends, and the next message starts another"
                found(Hanging(f"{what} hangs, after {signs.steps} steps, in {where(watched)}: {still}. {then}"))
                return

    threading.Thread(target=look, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _group_processor_s() -> float:
    """Processor time of this process and its living descendants [s], without this thread, which reads all processes."""
    own = psutil.Process()
    return -time.thread_time() + sum(_processor_s(each.pid) for each in (own, *own.children(recursive=True)))
