"""The runs of a real server: submitted, resumed, stopped.

A run's folder says how it is: its server process holds a lock there while it lives, and leaves ``done`` or
``error.json`` when it ends by itself. A run without either whose lock is free has died, with its machine, with
`fedsync server` or alone, and `fedsync.ops.run_watchdog` submits it again to go on from its newest checkpoint.

Whoever submits, resumes or stops a run holds another lock meanwhile, and looks at the run only then: operator and
keeper never do so at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum, auto
from pathlib import Path

import yaml

from fedsync.common.files import private_folder, write_atomically
from fedsync.common.locks import PATIENCE_S, held, taken
from fedsync.config.server_start import ServerStartConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.errors import ConfigError, FedSyncError, RunError
from fedsync.flower.checkpoints import newest_version
from fedsync.flower.environment import flower_environment
from fedsync.flower.internals.registration import write_connection
from fedsync.flower.run_folder import DONE_FILE, ERROR_FILE, PID_FILE, RUN_LOCK, write_error
from fedsync.identity.certificates import Authority
from fedsync.ops.bundle import submit, withdraw, write_bundle
from fedsync.ops.programs import CONNECTION

logger = logging.getLogger(__name__)

RUNS = "runs"
"""Folder in a server's state folder that has all of its runs, or links to them."""

RUN_FILE = "run.json"
"""In a run's folder: its settings, and what Flower calls it."""

CHANGE_LOCK = "change.lock"
"""In a run's folder: locked by whoever submits, resumes or stops the run."""

START_S = 300.0
"""Time in which Flower starts the server process of a run [s]; after it the process is taken to have died at once."""

_APP, _STRATEGY = "app", "strategy.yaml"
_BEGIN_S, _END_S, _LEAVE_S = 5.0, 10.0, 30.0
_STOP_WAIT_S = 300.0
_PAUSE_S = 0.05


class BusyError(ConfigError):
    """A run cannot be changed at this moment: somebody else does so, or it goes on."""


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
        submitted_s = (folder / _APP).stat().st_mtime
    except FileNotFoundError:
        return False
    # A clock that was set back must not make it wait for longer.
    return abs(time.time() - submitted_s) < START_S


def connect(config: ServerStartConfig) -> None:
    """Tell Flower's command line how to reach the server, with its state folder as ``FLWR_HOME``."""
    write_connection(Path(config.state), CONNECTION, config.loopback, authority_of(config))


def authority_of(config: ServerStartConfig) -> Path | None:
    """Certificate of the federation's authority; None without TLS."""
    return None if config.certificates is None else Authority.at(Path(config.certificates)).certificate


def submit_run(
    config: ServerStartConfig,
    strategy: StrategyConfig,
    out: Path | None = None,
    target_accuracy: float | None = None,
) -> Path:
    """Start a run on the server; returns the folder of its files.

    Args:
        config: of the server.
        strategy: what to run, checked.
        out: folder for the run's files; left out, one below the server's state folder.
        target_accuracy: for ``seconds_to_target``.

    Raises:
        ConfigError: the folder has a run already, or nothing can be written there.
        RunError: the server does not take it.
    """
    state = private_folder(Path(config.state))
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    folder = (out or state / RUNS / f"{strategy.name}-{stamp}").resolve()
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    settings = _settings(config, folder, target_accuracy)
    with _changing(folder):
        if (folder / RUN_FILE).exists():
            raise ConfigError("--out", f"{folder} has the files of a run", "Choose another folder, or use --resume")
        (folder / _STRATEGY).write_text(yaml.safe_dump(strategy.model_dump(mode="json")), encoding="utf-8")
        _hand_over(config, folder, settings)
    return folder


def _settings(config: ServerStartConfig, folder: Path, target_accuracy: float | None) -> dict[str, str | float]:
    return {
        "strategy": str(folder / _STRATEGY),
        "silos": "",
        "overrides": "",
        "out": str(folder),
        "control": str(folder),
        "keys": config.keys or "",
        "registered": "" if config.insecure else "yes",
        "resume": "",
        "target-accuracy": "" if target_accuracy is None else float(target_accuracy),
    }


def resume_run(config: ServerStartConfig, folder: Path, *, died: bool = False) -> None:
    """Go on with a run that has died or failed, from its newest checkpoint; without one it begins anew.

    Args:
        config: of the server.
        folder: of the run's files.
        died: only if it has died; one that failed, or was stopped, stays as it is.

    Raises:
        BusyError: somebody else resumes or stops it, it waits for its beginning, or its server process lives.
        ConfigError: there is no run in the folder, it has come to its end, or nothing can be written there.
        RunError: the server does not take it.
    """
    folder = folder.resolve()
    _read(folder)
    with _changing(folder):
        record = _read(folder)
        _check_idle(folder, died=died)
        if record.number:
            withdraw(record.number, CONNECTION, flower_environment(Path(config.state)))
        # Before it is handed over: what its server process writes at once is not to be removed.
        (folder / PID_FILE).unlink(missing_ok=True)
        (folder / ERROR_FILE).unlink(missing_ok=True)
        resume = "yes" if newest_version(folder) is not None else ""
        _hand_over(config, folder, {**record.settings, "resume": resume})


def _check_idle(folder: Path, *, died: bool) -> None:
    """That a run may be resumed; arguments and errors as for `resume_run`."""
    if (folder / DONE_FILE).exists():
        raise ConfigError(str(folder), "the run has come to its end", "Start another one")
    now = phase(folder)
    if now is Phase.AT_WORK:
        raise BusyError(str(folder), "the run is at work", "Watch it: `fedsync watch`")
    if now is Phase.WAITING:
        remedy = f"Wait: it is submitted again after {START_S:g} s. Or end it: `fedsync server stop`"
        raise BusyError(str(folder), "the run was submitted, and Flower has not begun it", remedy)
    if died and now is not Phase.DIED:
        raise BusyError(str(folder), "the run has not died", "Resume it with `fedsync server run --resume`")
    if not _ends(folder, _LEAVE_S):
        remedy = "Wait until it has; `fedsync server stop` ends it"
        raise BusyError(str(folder), "the run is over, but its server process has not ended", remedy)


def stop_run(folder: Path) -> None:
    """End a run before its time, whether it waits, works or has died; it can be resumed, and is not by itself.

    Raises:
        ConfigError: there is no run in the folder, it is over, or nothing can be written there.
        RunError: its server process does not end.
    """
    folder = folder.resolve()
    _read(folder)
    with _changing(folder, _STOP_WAIT_S):
        record = _read(folder)
        if phase(folder) is Phase.OVER and not held(folder / RUN_LOCK):
            remedy = "Nothing is to be done; `fedsync server run --resume` goes on with one that failed"
            raise ConfigError(str(folder), "the run is over", remedy)
        if not (folder / ERROR_FILE).exists():
            write_error(folder, RunError("stopped by the operator"))
        end_process(folder)
        if record.number:
            try:
                withdraw(record.number, CONNECTION, flower_environment(record.state))
            except RunError as error:
                logger.warning("Flower does not know yet that the run is over: %s", error)
        # Flower may have begun it meanwhile. One that begins later is ended by the keeper.
        end_process(folder)


def end_process(folder: Path) -> None:
    """End the server process of a run, if it lives: ask, wait, then kill.

    Raises:
        ConfigError: it is another user's.
        RunError: it does not end.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        # It takes the lock before it writes its number.
        if _ends(folder, _BEGIN_S, lambda: (folder / PID_FILE).exists()):
            return
        _signal(folder, number)
        if _ends(folder, _END_S):
            return
    raise RunError(f"the server process of the run in {folder} does not end")


def _ends(folder: Path, wait_s: float, enough: Callable[[], bool] = lambda: False) -> bool:
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


@dataclass(frozen=True, slots=True)
class _Record:
    """What `RUN_FILE` says: Flower's number of the run, the server's state folder, the settings."""

    number: str
    state: Path
    settings: dict[str, str | float]


def _read(folder: Path) -> _Record:
    try:
        record = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
        return _Record(str(record["number"]), Path(record["state"]), dict(record["settings"]))
    except FileNotFoundError:
        remedy = "Name the folder that `fedsync server run` printed"
        raise ConfigError(str(folder), "no run of a server is here", remedy) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        remedy = "Start the run anew, in another folder"
        raise ConfigError(str(folder / RUN_FILE), f"cannot be read: {error!r}", remedy) from error


@contextmanager
def _changing(folder: Path, wait_s: float = PATIENCE_S) -> Iterator[None]:
    """Be the only one who submits, resumes or stops the run."""
    with _writing(folder), taken(folder / CHANGE_LOCK, wait_s) as alone:
        if not alone:
            problem = "the run is being resumed or stopped by somebody else, perhaps by `fedsync server start`"
            raise BusyError(str(folder), problem, "Try again in a minute")
        yield


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Errors of the file system name folder and remedy."""
    try:
        yield
    except OSError as error:
        remedy = "Check the folder, its permissions and the disk"
        raise ConfigError(str(folder), f"cannot be written: {error.strerror or error}", remedy) from error


def _hand_over(config: ServerStartConfig, folder: Path, settings: dict[str, str | float]) -> None:
    app, number = folder / _APP, ""
    shutil.rmtree(app, ignore_errors=True)
    connect(config)
    environment = flower_environment(Path(config.state))
    _list(Path(config.state), folder)
    try:
        number = submit(write_bundle(app, settings), CONNECTION, environment)
        record = {"number": number, "state": str(Path(config.state).resolve()), "settings": settings}
        write_atomically(folder / RUN_FILE, json.dumps(record, indent=2).encode() + b"\n")
    except (FedSyncError, OSError):
        shutil.rmtree(app, ignore_errors=True)  # by which `phase` knows what is handed over
        if number:
            with contextlib.suppress(RunError):
                withdraw(number, CONNECTION, environment)
        raise
    logger.info("run %s: %s", number, folder)


def _list(state: Path, folder: Path) -> None:
    """Have the keeper find a run that is elsewhere."""
    runs = state.resolve() / RUNS
    if folder.parent == runs:
        return
    runs.mkdir(exist_ok=True)
    link = runs / f"{folder.name}-{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"
    if not link.is_symlink():
        link.symlink_to(folder)
