"""Supervisor of the processes of a real silo or server: restarts with growing pauses, rotating logs, health file."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

from fedsync.common import foreign
from fedsync.common.backoff import Backoff
from fedsync.common.errors import ConfigError
from fedsync.common.files import OWNER_FILE, private_folder, write_atomically
from fedsync.common.fork_server import fork
from fedsync.common.locks import taken
from fedsync.common.log_times import QuietFile
from fedsync.common.processes import Child, end_processes, start_apart
from fedsync.config.silo_start import LogsConfig

logger = foreign.logger(__name__)

HEALTH_FILE, LOGS_FOLDER, LOCK_FILE = "health.json", "logs", "supervisor.lock"
FRESH_S = 30.0
"""Maximum age of a live supervisor's health file [s]."""

_LOOK_S = 0.25
_TELL_S = 10.0
_TIDY_S = 60.0
_KEPT_LINES, _LAST_LINES, _LAST_CHARACTERS, _MOST_LINE = 20, 4, 500, 2**16
_INFORMS = "INFO"
"""Beginning of lines of Flower and Uvicorn that name no problem; they also log their shutdown in such lines."""

_REFUSED = " (new keys need `fedsync server register` at the server; wait 60 s after a crash; do two machines use it?)"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")

RESTARTS = Backoff(1.0, 8.0)
"""Short pause before a restart, doubled with each failure: the SuperLink rejects a node for 60 s after its crash."""

HEALTHY_S = 60.0
"""Runtime of a process after which the next failure gets the shortest pause [s]."""


@dataclass(frozen=True, slots=True)
class Program:
    """Process to keep running; ``rejoins``: the SuperLink authenticates it, and rejects it for 60 s after a crash."""

    role: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    rejoins: bool = False


class LoggedProcess:
    """Process in its own process group, whose output goes to a rotating log."""

    def __init__(
        self,
        program: Program,
        environment: Mapping[str, str],
        folder: Path,
        limits: LogsConfig,
        fork_server: Path | None = None,
    ) -> None:
        self._process, self._output = _started(program.command, {**environment, **program.environment}, fork_server)
        self._last: deque[str] = deque(maxlen=_KEPT_LINES)
        handler = QuietFile(folder / f"{program.role}.log", limits.bytes, limits.keep, level=False)
        self._pump = threading.Thread(target=self._copy, args=(handler,), daemon=True)
        self._pump.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def last_words(self) -> str:
        """Return the last lines of the output: warnings and errors if there are any."""
        self._pump.join(timeout=1.0)
        lines = list(self._last)
        lines = [line for line in lines if not line.startswith(_INFORMS)] or lines
        return " | ".join(lines[-_LAST_LINES:])[-_LAST_CHARACTERS:]

    def end(self) -> None:
        end_processes([self._process])
        self._pump.join(timeout=1.0)

    @staticmethod
    def kill(some: Sequence[LoggedProcess]) -> None:
        end_processes([each._process for each in some], grace_s=0.0)

    def _copy(self, handler: logging.Handler) -> None:
        with contextlib.closing(handler), self._output:
            while raw := self._output.readline(_MOST_LINE):
                line = foreign.shown(_COLOUR.sub("", raw.decode("utf-8", "replace")).rstrip(), None)
                if line:
                    self._last.append(line)
                    handler.emit(logging.makeLogRecord({"msg": line}))


def _started(command: Sequence[str], environment: Mapping[str, str], server: Path | None) -> tuple[Child, BinaryIO]:
    """Start a process in its own group, so that Ctrl-C reaches only the supervisor, which ends processes in order."""
    reading, writing = os.pipe()
    output = os.fdopen(reading, "rb")
    try:
        child: Child | None = None if server is None else fork(server, command, environment, writing)
        if child is None:
            child = start_apart(command, writing, environment)
    except OSError:
        output.close()
        raise
    finally:
        os.close(writing)
    return child, output


@dataclass(slots=True)
class _State:
    process: LoggedProcess | None = None
    started_s: float = 0.0
    due_s: float = 0.0
    failures: int = 0
    restarts: int = 0


class Supervisor:
    """State of all processes: running, or due for a restart."""

    def __init__(
        self,
        programs: Sequence[Program],
        launch: Callable[[Program], LoggedProcess],
        jitter: Callable[[], float],
        now_s: float,
    ) -> None:
        self._programs = {program.role: program for program in programs}
        self._launch = launch
        self._jitter = jitter
        self._states = {role: _State(due_s=now_s) for role in self._programs}
        self.last_error: str | None = None

    @property
    def restarts(self) -> int:
        return sum(state.restarts for state in self._states.values())

    @property
    def running(self) -> bool:
        return all(state.process is not None for state in self._states.values())

    def step(self, now_s: float) -> None:
        for role, state in self._states.items():
            code = None if state.process is None else state.process.poll()
            if code is not None:
                self._ended(role, code, now_s)
        for role, state in self._states.items():
            if state.process is None and state.due_s <= now_s:
                self._start(role, now_s)

    def processes(self) -> dict[str, dict[str, Any]]:
        return {
            role: {"pid": None if state.process is None else state.process.pid, "restarts": state.restarts}
            for role, state in self._states.items()
        }

    def stop(self) -> bool:
        """End all processes in reverse start order; returns False if none ran. `step` restarts the processes."""
        ended = False
        for state in reversed(self._states.values()):
            if state.process is not None:
                state.process.end()
                state.process, ended = None, True
        return ended

    def _start(self, role: str, now_s: float) -> None:
        state = self._states[role]
        try:
            state.process = self._launch(self._programs[role])
        except OSError as error:
            self.last_error = f"{role} could not be started: {error}"
            self._wait(role, now_s, now_s)
        else:
            state.started_s = now_s

    def _ended(self, role: str, code: int, now_s: float) -> None:
        state = self._states[role]
        assert state.process is not None
        words = state.process.last_words()
        state.process.end()
        self._wait(role, state.started_s, now_s)
        why = _REFUSED if self._programs[role].rejoins else ""
        self.last_error = f"{role} ended with code {code}{why}" + (f": {words}" if words else "")

    def _wait(self, role: str, started_s: float, now_s: float) -> None:
        state = self._states[role]
        if now_s - started_s >= HEALTHY_S:
            state.failures = 0
        # Jitter, so that silos do not reconnect simultaneously.
        state.due_s = now_s + RESTARTS.pause_s(state.failures) * (0.5 + 0.5 * self._jitter())
        state.failures += 1
        state.restarts += 1
        state.process = None


@contextmanager
def alone_in(state: Path) -> Iterator[None]:
    """Lock the state folder against other supervisors; `ConfigError` if it is unusable or in use."""
    private_folder(state)
    with taken(state / LOCK_FILE) as alone:
        if not alone:
            remedy = "End that process first, or give each process its own state folder"
            raise ConfigError(str(state), "another FedSync is at work in this folder", remedy)
        yield


@contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    stop = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        stop.set()

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def supervise(
    programs: Sequence[Program],
    environment: Mapping[str, str],
    state: Path,
    limits: LogsConfig,
    facts: Mapping[str, Any],
    stop: threading.Event,
    tidy: Callable[[], object] = lambda: None,
    tell: Callable[[], Mapping[str, Any]] = dict,
    here: Callable[[], bool] = lambda: True,
    leave: Callable[[], object] = lambda: None,
) -> None:
    """Keep programs running until ``stop`` is set, then end them.

    ``tidy`` cleans up once a minute; ``tell`` returns further entries of the health file. Programs end while ``here``
    returns False; ``leave`` is called after that.
    """
    logs = state / LOGS_FOLDER
    logs.mkdir(mode=0o700, exist_ok=True)
    # System randomness, so that silos started together do not reconnect together.
    jitter = random.SystemRandom().random
    supervisor = Supervisor(
        programs, lambda program: LoggedProcess(program, environment, logs, limits), jitter, time.monotonic()
    )
    health = _Health(state / HEALTH_FILE, {**facts, "versions": versions()}, tell)
    tidy_at_s = time.monotonic() + _TIDY_S
    try:
        while not stop.is_set():
            now_s = time.monotonic()
            if here():
                supervisor.step(now_s)
                health.tell("running" if supervisor.running else "restarting", supervisor, now_s)
            else:
                if supervisor.stop():
                    leave()
                health.tell("away", supervisor, now_s)
            if now_s >= tidy_at_s:
                tidy()
                tidy_at_s = now_s + _TIDY_S
            stop.wait(_LOOK_S)
        health.tell("stopping", supervisor, time.monotonic())
    finally:
        supervisor.stop()
        health.tell("stopped", supervisor, time.monotonic())


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("fedsync", "flwr", "torch")}


class _Health:
    """Writer of the health file, on every change and at regular intervals."""

    def __init__(self, path: Path, facts: Mapping[str, Any], tell: Callable[[], Mapping[str, Any]]) -> None:
        self._path = path
        self._facts = facts
        self._tell = tell
        self._told: dict[str, Any] = {}
        self._state = ""
        self._since = ""
        self._due_s = 0.0
        self._error: str | None = None

    def tell(self, state: str, supervisor: Supervisor, now_s: float) -> None:
        at = datetime.now(UTC).isoformat(timespec="seconds")
        if state != self._state:
            self._state, self._since = state, at
            logger.info("%s", state)
        if supervisor.last_error != self._error:
            self._error = supervisor.last_error
            logger.warning("%s", self._error)
        told = {
            **self._facts,
            "state": state,
            "since": self._since,
            "restarts": supervisor.restarts,
            "processes": supervisor.processes(),
            "last_error": supervisor.last_error,
        }
        if told == self._told and now_s < self._due_s:
            return
        self._told, self._due_s = told, now_s + _TELL_S
        text = json.dumps({**told, **self._tell(), "at": at}, indent=2) + "\n"
        try:
            write_atomically(self._path, text.encode(), OWNER_FILE)
        except ConfigError as error:  # a full disk must not end the programs
            logger.warning("%s", error)
