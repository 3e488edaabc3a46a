"""Supervisor of the processes of a real silo or server, with growing pauses between restarts.

This module only decides, and reads no clock. `fedsync.ops.supervisor_loop` starts and stops processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fedsync.common.backoff import Backoff

RESTARTS = Backoff(1.0, 8.0)
"""Pause before a restart; each consecutive failure doubles the pause. Short, because the SuperLink rejects an
authenticated node for 60 s after its crash."""

HEALTHY_S = 60.0
"""Runtime of a process after which the next failure gets the shortest pause [s]."""


@dataclass(frozen=True, slots=True)
class Program:
    """Process to keep running; ``rejoins``: the SuperLink authenticates it, and rejects it for 60 s after a crash."""

    role: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    rejoins: bool = False


class Process(Protocol):
    """Interface of a started program."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""

    def last_words(self) -> str:
        """Return the end of the output."""

    def end(self) -> None:
        """End the process and its children."""


@dataclass(slots=True)
class _State:
    process: Process | None = None
    started_s: float = 0.0
    due_s: float = 0.0
    failures: int = 0
    restarts: int = 0


class Supervisor:
    """State of all processes: running, or due for a restart."""

    def __init__(
        self,
        programs: Sequence[Program],
        launch: Callable[[Program], Process],
        jitter: Callable[[], float],
        now_s: float,
    ) -> None:
        self._programs = {program.role: program for program in programs}
        self._launch = launch
        self._jitter = jitter
        self._states = {role: _State(due_s=now_s) for role in self._programs}
        self.last_error: str | None = None
        """Exit code and last output of the process that ended last."""

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
        rejoins = self._programs[role].rejoins
        why = " (the server may keep its place for a minute after a crash)" if rejoins else ""
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
