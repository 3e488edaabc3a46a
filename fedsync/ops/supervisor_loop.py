"""Runs what a `fedsync.ops.supervisor` decides: real processes, logs that rotate, the health file, a clean end."""

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
from fedsync.common.forking import Nursery
from fedsync.common.locks import taken
from fedsync.common.log_times import QuietFile
from fedsync.common.processes import Child, end_processes
from fedsync.config.silo_start import LogsConfig
from fedsync.ops.supervisor import Program, Supervisor

logger = foreign.logger(__name__)

HEALTH_FILE, LOGS_FOLDER, LOCK_FILE = "health.json", "logs", "supervisor.lock"
FRESH_S = 30.0
"""A health file that is older [s] was left by a supervisor that is gone."""

_LOOK_S = 0.25
_TELL_S = 10.0
_TIDY_S = 60.0
_LAST_LINES, _LAST_CHARACTERS = 4, 500
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class LoggedProcess:
    """A process of its own group whose output goes to a log that rotates.

    Args:
        program: what to start.
        environment: of it, all of it.
        folder: for its log.
        limits: of the log.
        nursery: forks it, where there is one.
    """

    def __init__(
        self,
        program: Program,
        environment: Mapping[str, str],
        folder: Path,
        limits: LogsConfig,
        nursery: Nursery | None = None,
    ) -> None:
        self._process, self._output = _started(program.command, {**environment, **program.environment}, nursery)
        self._last: deque[str] = deque(maxlen=_LAST_LINES)
        handler = QuietFile(folder / f"{program.role}.log", limits.bytes, limits.keep, level=False)
        self._pump = threading.Thread(target=self._copy, args=(handler,), daemon=True)
        self._pump.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""
        return self._process.poll()

    def last_words(self) -> str:
        """The end of its output, on one line."""
        self._pump.join(timeout=1.0)
        return " | ".join(self._last)[-_LAST_CHARACTERS:]

    def end(self) -> None:
        """End it, and what it started."""
        end_processes([self._process])
        self._pump.join(timeout=1.0)

    @staticmethod
    def kill(some: Sequence[LoggedProcess]) -> None:
        """End them and what they started at once."""
        end_processes([each._process for each in some], grace_s=0.0)

    def _copy(self, handler: logging.Handler) -> None:
        with contextlib.closing(handler), self._output:
            for raw in self._output:
                line = foreign.shown(_COLOUR.sub("", raw.decode("utf-8", "replace")).rstrip(), None)
                if line:
                    self._last.append(line)
                    handler.emit(logging.makeLogRecord({"msg": line}))


def _started(command: Sequence[str], environment: Mapping[str, str], nursery: Nursery | None) -> tuple[Child, BinaryIO]:
    """A process that leads a group, and its output: Ctrl-C goes to the supervisor, which ends processes in order."""
    reading, writing = os.pipe()
    output = os.fdopen(reading, "rb")
    try:
        child: Child | None = None if nursery is None else nursery.fork(command, environment, writing)
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
    """Make the state folder if need be, and be the only supervisor in it.

    Raises:
        ConfigError: the folder will not do, or another supervisor is at work there.
    """
    private_folder(state)
    with taken(state / LOCK_FILE) as alone:
        if not alone:
            remedy = "End that one first, or give each its own state folder"
            raise ConfigError(str(state), "another FedSync is at work in this folder", remedy)
        yield


@contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set, instead of ending this process."""
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
    """Keep programs running until ``stop`` is set, then end them all.

    Args:
        programs: in the order in which they are started.
        environment: of all of them.
        state: folder for logs and the health file.
        limits: of the logs.
        facts: what the health file says besides.
        stop: set by whoever wants the end.
        tidy: called once a minute.
        tell: called whenever the health file is written: what it says besides that changes.
        here: whether the programs are to run at the moment.
        leave: called when they have ended because they are not to run.
    """
    logs = state / LOGS_FOLDER
    logs.mkdir(mode=0o700, exist_ok=True)
    # The system's randomness: silos that were started together are not to come back together.
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
    """Of what matters between the parties."""
    return {name: version(name) for name in ("fedsync", "flwr", "torch")}


class _Health:
    """Writes the health file when something has changed, and now and then so that it stays fresh."""

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
        except ConfigError as error:  # a full disk must not end what runs
            logger.warning("%s", error)
