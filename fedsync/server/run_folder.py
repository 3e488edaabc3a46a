"""How a run's server process says how it is, and is ended: files in a folder. Light, for those who only look."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from enum import Enum, auto
from pathlib import Path

from fedsync.common.errors import ConfigError, FedSyncError, RunError
from fedsync.common.files import OWNER_FILE, write_atomically
from fedsync.common.locks import held
from fedsync.common.run_claim import DONE_FILE as DONE_FILE
from fedsync.common.run_claim import ERROR_FILE as ERROR_FILE
from fedsync.common.run_claim import RUN_LOCK as RUN_LOCK

PID_FILE = "server.pid"
"""Number of the server process."""

APP = "app"
"""Folder in it, while the run is handed over: the Flower app of the run."""

START_S = 300.0
"""Time in which Flower starts the server process of a run [s]; after it the process is taken to have died at once."""

_BEGIN_S, _END_S = 5.0, 10.0
_PAUSE_S = 0.05


class Phase(Enum):
    """What a run's folder says of it."""

    WAITING = auto()
    """Flower has not started its server process."""

    AT_WORK = auto()
    OVER = auto()
    DIED = auto()


def phase(folder: Path) -> Phase:
    """How the run in a folder is."""
    # In this order: what a process leaves at its end is there before its lock is free.
    alive = held(folder / RUN_LOCK)
    if (folder / DONE_FILE).exists() or (folder / ERROR_FILE).exists():
        return Phase.OVER
    if alive:
        return Phase.AT_WORK
    if _just_submitted(folder) and not (folder / PID_FILE).exists():
        return Phase.WAITING
    # It may have begun meanwhile.
    return Phase.AT_WORK if held(folder / RUN_LOCK) else Phase.DIED


def _just_submitted(folder: Path) -> bool:
    try:
        submitted_s = (folder / APP).stat().st_mtime
    except FileNotFoundError:
        return False
    # A clock that was set back must not make it wait for longer.
    return abs(time.time() - submitted_s) < START_S


def write_error(control: Path, error: FedSyncError) -> None:
    """Leave the reason for which a run ended."""
    if isinstance(error, ConfigError):
        told = {"kind": "config", "place": error.place, "problem": error.problem, "remedy": error.remedy}
    else:
        told = {"kind": "run", "message": str(error)}
    write_atomically(control / ERROR_FILE, json.dumps(told).encode(), OWNER_FILE)


def read_error(control: Path) -> ConfigError | RunError:
    """The error that `write_error` left."""
    told = json.loads((control / ERROR_FILE).read_text(encoding="utf-8"))
    if told["kind"] == "config":
        return ConfigError(told["place"], told["problem"], told["remedy"])
    return RunError(told["message"])


def end_process(folder: Path) -> None:
    """End the server process of a run, if it lives: ask, wait, then kill.

    Raises:
        ConfigError: it is another user's.
        RunError: it does not end.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        # It takes the lock before it writes its number.
        if ends(folder, _BEGIN_S, lambda: (folder / PID_FILE).exists()):
            return
        _signal(folder, number)
        if ends(folder, _END_S):
            return
    raise RunError(f"the server process of the run in {folder} does not end")


def ends(folder: Path, wait_s: float, enough: Callable[[], bool] = lambda: False) -> bool:
    """Wait until the server process has ended, or for something else; returns whether it has."""
    end_s = time.monotonic() + wait_s
    while held(folder / RUN_LOCK):
        if enough() or time.monotonic() >= end_s:
            return False
        time.sleep(_PAUSE_S)
    return True


def _signal(folder: Path, number: signal.Signals) -> None:
    try:
        os.kill(int((folder / PID_FILE).read_text(encoding="utf-8")), number)
    except (ProcessLookupError, FileNotFoundError):
        pass  # it has just ended, or does not say its number
    except PermissionError:
        remedy = "Stop it as the user that runs `fedsync server start`"
        raise ConfigError(str(folder), "the server process is another user's", remedy) from None
