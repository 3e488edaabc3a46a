"""The runs of a real server: submitted, kept going when their ServerApp dies, stopped.

A run's folder says how it is: its server process holds a lock there while it lives, and leaves ``done`` or
``error.json`` when it ends by itself. A run without either whose lock is free has died, with its machine, with
`fedsync server` or alone, and is submitted again to go on from its newest checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum, auto
from pathlib import Path

import yaml

from fedsync.config.server import ServerStartConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.errors import ConfigError, RunError
from fedsync.core.private import private_folder, write_atomically
from fedsync.identity.certificates import Authority
from fedsync.runtime.bundle import submit, withdraw, write_bundle
from fedsync.runtime.checkpoints import newest_version
from fedsync.runtime.control import DONE_FILE, ERROR_FILE, PID_FILE, RUN_LOCK, write_error
from fedsync.runtime.environment import flower_environment
from fedsync.runtime.locks import held
from fedsync.runtime.registration import write_connection
from fedsync.runtime.supervisor_plans import CONNECTION

logger = logging.getLogger(__name__)

RUNS = "runs"
"""Folder in a server's state folder that has all of its runs, or links to them."""

RUN_FILE = "run.json"
"""In a run's folder: its settings, and what Flower calls it."""

MOST_TRIES = 5
"""Times that a run is submitted again without a new version of the model in between."""

START_S = 300.0
"""Time in which Flower starts the server process of a run [s]; after it the process is taken to have died at once."""

LONGEST_S = 600.0
"""Longest pause before a run is resumed that dies again and again [s]."""

_APP, _STRATEGY = "app", "strategy.yaml"
_LOOK_S, _REFUSED_S, _FIRST_S = 2.0, 5.0, 2.0


class Phase(Enum):
    """What a run's folder says of it."""

    WAITING = auto()
    """Flower has not started its server process."""

    AT_WORK = auto()
    OVER = auto()
    DIED = auto()


def phase(folder: Path) -> Phase:
    """How the run in a folder is."""
    if (folder / DONE_FILE).exists() or (folder / ERROR_FILE).exists():
        return Phase.OVER
    if held(folder / RUN_LOCK):
        return Phase.AT_WORK
    submitted = folder / _APP
    waits = submitted.exists() and time.time() - submitted.stat().st_mtime < START_S
    return Phase.WAITING if waits and not (folder / PID_FILE).exists() else Phase.DIED


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
        ConfigError: the folder has a run already.
        RunError: the server does not take it.
    """
    state = private_folder(Path(config.state))
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    folder = (out or state / RUNS / f"{strategy.name}-{stamp}").resolve()
    if (folder / RUN_FILE).exists():
        raise ConfigError("--out", f"{folder} has the files of a run", "Choose another folder, or use --resume")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _STRATEGY).write_text(yaml.safe_dump(strategy.model_dump(mode="json")), encoding="utf-8")
    settings: dict[str, str | float] = {
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
    _hand_over(config, folder, settings)
    _list(state, folder)
    return folder


def resume_run(config: ServerStartConfig, folder: Path) -> None:
    """Go on with a run that has died or failed, from its newest checkpoint; without one it begins anew.

    Raises:
        ConfigError: there is no run in the folder, it goes on, or it has come to its end.
        RunError: the server does not take it.
    """
    folder = folder.resolve()
    file = folder / RUN_FILE
    if not file.exists():
        raise ConfigError(str(folder), "no run of a server is here", "Name the folder that `server run` printed")
    if (folder / DONE_FILE).exists():
        raise ConfigError(str(folder), "the run has come to its end", "Start another one")
    if phase(folder) is Phase.AT_WORK:
        raise ConfigError(str(folder), "the run is at work", "Watch it: `fedsync watch`")
    # Before it is handed over: what its server process writes at once is not to be removed.
    (folder / PID_FILE).unlink(missing_ok=True)
    (folder / ERROR_FILE).unlink(missing_ok=True)
    record = json.loads(file.read_text(encoding="utf-8"))
    if record["number"]:
        withdraw(record["number"], CONNECTION, flower_environment(Path(config.state)))
    resume = "yes" if newest_version(folder) is not None else ""
    _hand_over(config, folder, {**record["settings"], "resume": resume})
    _list(Path(config.state), folder)


def stop_run(folder: Path) -> None:
    """End a run before its time; it can be resumed.

    Raises:
        ConfigError: no run is at work there.
    """
    folder = folder.resolve()
    if phase(folder) is not Phase.AT_WORK or not (folder / PID_FILE).exists():
        raise ConfigError(str(folder), "no run is at work here", "Name the folder that `fedsync server run` printed")
    write_error(folder, RunError("stopped by the operator"))
    os.kill(int((folder / PID_FILE).read_text(encoding="utf-8")), signal.SIGTERM)


@dataclass(slots=True)
class _Tries:
    version: int | None
    count: int = 0
    due_s: float = 0.0


@dataclass(slots=True)
class Keeper:
    """Submits the runs of a server again that have died.

    Args:
        state: the server's state folder.
        resume: has the run in a folder go on.
    """

    state: Path
    resume: Callable[[Path], None]
    _tries: dict[Path, _Tries] = field(default_factory=dict)

    def watch(self, stop: threading.Event) -> None:
        """Look every other second until ``stop`` is set."""
        while not stop.wait(_LOOK_S):
            self.look(time.monotonic())

    def look(self, now_s: float) -> None:
        """Resume what has died and is due; a run that dies again and again without getting on is given up."""
        for entry in sorted(self.state.glob(f"{RUNS}/*/{RUN_FILE}")):
            folder = entry.parent.resolve()
            if phase(folder) is Phase.DIED:
                self._care_for(folder, now_s)

    def _care_for(self, folder: Path, now_s: float) -> None:
        version = newest_version(folder)
        tries = self._tries.get(folder)
        if tries is None or tries.version != version:
            tries = self._tries[folder] = _Tries(version)
        if now_s < tries.due_s:
            return
        if tries.count == MOST_TRIES:
            logger.error("%s died %d times at version %s and is given up", folder, MOST_TRIES + 1, version)
            died = f"its server process died {MOST_TRIES + 1} times at version {version}; see the logs"
            write_error(folder, RunError(died))
            return
        try:
            self.resume(folder)
        except RunError as error:  # the SuperLink may be on its way back
            logger.warning("%s could not be resumed: %s", folder, error)
            tries.due_s = now_s + _REFUSED_S
        except ConfigError as error:
            logger.exception("%s cannot be resumed", folder)
            write_error(folder, error)
        else:
            logger.info("resumed at version %s: %s", version, folder)
            tries.due_s = now_s + min(LONGEST_S, _FIRST_S * 2.0**tries.count)
            tries.count += 1


def _hand_over(config: ServerStartConfig, folder: Path, settings: dict[str, str | float]) -> None:
    shutil.rmtree(folder / _APP, ignore_errors=True)
    connect(config)
    try:
        number = submit(write_bundle(folder / _APP, settings), CONNECTION, flower_environment(Path(config.state)))
    except RunError:
        shutil.rmtree(folder / _APP)  # by which `phase` knows what is handed over
        raise
    record = {"number": number, "settings": settings}
    write_atomically(folder / RUN_FILE, json.dumps(record, indent=2).encode() + b"\n")
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
