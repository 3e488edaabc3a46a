"""Loop that carries out the decisions of `fedsync.ops.supervisor`: processes, rotating logs, health file, shutdown."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import re
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

from fedsync.common import foreign
from fedsync.common.errors import ConfigError
from fedsync.common.files import OWNER_FILE, private_folder, write_atomically
from fedsync.common.fork_server import fork
from fedsync.common.locks import taken
from fedsync.common.log_times import QuietFile
from fedsync.common.processes import Child, end_processes
from fedsync.config.silo_start import LogsConfig
from fedsync.ops.supervisor import Program, Supervisor

logger = foreign.logger(__name__)

HEALTH_FILE, LOGS_FOLDER, LOCK_FILE = "health.json", "logs", "supervisor.lock"
FRESH_S = 30.0
"""Maximum age of a live supervisor's health file [s]."""

_LOOK_S = 0.25
_TELL_S = 10.0
_TIDY_S = 60.0
_LAST_LINES, _LAST_CHARACTERS, _MOST_LINE = 4, 500, 2**16
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


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
        self._last: deque[str] = deque(maxlen=_LAST_LINES)
        handler = QuietFile(folder / f"{program.role}.log", limits.bytes, limits.keep, level=False)
        self._pump = threading.Thread(target=self._copy, args=(handler,), daemon=True)
        self._pump.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def last_words(self) -> str:
        self._pump.join(timeout=1.0)
        return " | ".join(self._last)[-_LAST_CHARACTERS:]

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
            child = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
    except OSError:
        output.close()
        raise
    finally:
        os.close(writing)
    return child, output


@contextmanager
def alone_in(state: Path) -> Iterator[None]:
    """Create the state folder if missing, and lock it against other supervisors. Raises `ConfigError` if the folder is
    unusable, or another supervisor uses it.
    """
    private_folder(state)
    with taken(state / LOCK_FILE) as alone:
        if not alone:
            remedy = "End that one first, or give each its own state folder"
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
    """Keep programs running until ``stop`` is set, then end all programs.

    Args:
        tidy: cleanup, called once a minute.
        tell: returns additional variable entries of the health file.
        leave: called after programs were ended because ``here`` returned False.
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
