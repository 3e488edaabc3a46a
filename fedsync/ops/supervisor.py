"""Keeps the processes of a real silo or server running: restarts with growing pauses, and an account of it.

What decides is here and reads no clock; what acts is in `fedsync.ops.supervisor_loop`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fedsync.common.backoff import Backoff

RESTARTS = Backoff(1.0, 60.0)
"""Pause before a restart; each failure in a row doubles it."""

HEALTHY_S = 60.0
"""A process that ran as long as this [s] begins anew with the shortest pause."""

PRESENT_S = 20.0
"""A process that ran as long as this [s] was let in: one that is turned away has ended before."""

REJOIN_S = 75.0
"""The server keeps the place of an authenticated node that vanished for 60 s, and turns it away until then."""

REJOIN_PAUSE_S = 5.0


@dataclass(frozen=True, slots=True)
class Program:
    """One process to keep running.

    Args:
        role: its name, of its log too.
        command: program and arguments.
        environment: variables beside those of all processes.
        rejoins: it proves who it is to the server, so that after a crash it is turned away for a while.
    """

    role: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    rejoins: bool = False


class Process(Protocol):
    """A program that was started."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""

    def last_words(self) -> str:
        """The end of its output."""

    def end(self) -> None:
        """End it, and what it started."""


def pause_s(failures: int, *, lost_s: float, rejoins: bool, jitter: float) -> float:
    """How long to wait before a restart [s].

    Args:
        failures: short runs in a row before the last one; 0 if that was a healthy one.
        lost_s: seconds since it last ran well, or since all began.
        rejoins: see `Program`.
        jitter: in [0, 1), so that silos do not come back in step.
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
    """Knows which processes run, and which are due.

    Args:
        programs: in the order in which they are started.
        launch: starts one.
        jitter: draws numbers in [0, 1).
        now_s: when it begins, by the clock that `step` is told.
    """

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
        """What the process that ended last said in the end."""

    @property
    def restarts(self) -> int:
        return sum(state.restarts for state in self._states.values())

    @property
    def running(self) -> bool:
        return all(state.process is not None for state in self._states.values())

    def step(self, now_s: float) -> None:
        """Note which processes have ended, and start those that are due."""
        for role, state in self._states.items():
            code = None if state.process is None else state.process.poll()
            if code is not None:
                self._ended(role, code, now_s)
        for role, state in self._states.items():
            if state.process is None and state.due_s <= now_s:
                self._start(role, now_s)

    def processes(self) -> dict[str, dict[str, Any]]:
        """Each process's number, None while it waits for its restart, and how often it was restarted."""
        return {
            role: {"pid": None if state.process is None else state.process.pid, "restarts": state.restarts}
            for role, state in self._states.items()
        }

    def stop(self) -> bool:
        """End all, the one that was started last first; whether any was there. `step` starts them again."""
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
        """Set when a process is due again; returns whether it may just have been turned away."""
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
