"""Supervisor of the processes of a real silo or server, with growing pauses between restarts.

This module decides, and reads no clock; `fedsync.ops.supervisor_loop` acts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fedsync.common.backoff import Backoff

RESTARTS = Backoff(1.0, 60.0)
"""Pause before a restart; each consecutive failure doubles the pause."""

HEALTHY_S = 60.0
"""Runtime of a process after which the next failure gets the shortest pause [s]."""

PRESENT_S = 20.0
"""Runtime that proves that the server accepted the node [s]; a rejected node ends earlier."""

REJOIN_S = 75.0
"""Time with constant short pauses [s]: the server rejects an authenticated node for 60 s after its crash."""

REJOIN_PAUSE_S = 5.0


@dataclass(frozen=True, slots=True)
class Program:
    """Process to keep running; ``rejoins``: the server authenticates it, and rejects it for a while after a crash."""

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


def pause_s(failures: int, *, lost_s: float, rejoins: bool, jitter: float) -> float:
    """Return the pause before a restart [s].

    Args:
        failures: number of consecutive short runs before the last run; 0 after a healthy run.
        lost_s: seconds since the process last ran well, or since the supervisor started.
        jitter: in [0, 1), so that silos do not reconnect simultaneously.
    """
    if rejoins and lost_s < REJOIN_S:
        return REJOIN_PAUSE_S * (0.75 + 0.5 * jitter)
    return RESTARTS.pause_s(failures) * (0.5 + 0.5 * jitter)


@dataclass(slots=True)
class _State:
    process: Process | None = None
    started_s: float = 0.0
    due_s: float = 0.0
    lost_s: float = 0.0
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
        self._states = {role: _State(due_s=now_s, lost_s=now_s) for role in self._programs}
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
        turned_away = self._wait(role, state.started_s, now_s)
        why = " (the server may keep its place for a minute after a crash)" if turned_away else ""
        self.last_error = f"{role} ended with code {code}{why}" + (f": {words}" if words else "")

    def _wait(self, role: str, started_s: float, now_s: float) -> bool:
        """Schedule the restart of a process; returns True if the server may just have rejected the process."""
        state, program = self._states[role], self._programs[role]
        healthy = now_s - started_s >= HEALTHY_S
        if now_s - started_s >= PRESENT_S:
            state.lost_s = now_s
        pause = pause_s(
            0 if healthy else state.failures,
            lost_s=now_s - state.lost_s,
            rejoins=program.rejoins,
            jitter=self._jitter(),
        )
        turned_away = program.rejoins and now_s - state.lost_s < REJOIN_S
        state.failures = 0 if healthy or turned_away else state.failures + 1
        state.process = None
        state.due_s = now_s + pause
        state.restarts += 1
        return turned_away
