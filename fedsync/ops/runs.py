"""Submission, resumption and stop of runs on a real server.

A run's folder holds the run's state. The server process holds a lock in the folder while the process lives, and writes
``done`` or ``error.json`` when it ends by itself. A run with a free lock and without these files has died.
`fedsync.ops.run_watchdog` resubmits a dead run, which continues from its newest checkpoint.

A process that submits, resumes or stops a run holds a second lock, and reads the run's state only under this lock. So
operator and watchdog never change a run at the same time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import yaml

from fedsync.common import foreign
from fedsync.common.errors import ConfigError, FedSyncError, RunError
from fedsync.common.files import private_folder, write_atomically, writing
from fedsync.common.locks import PATIENCE_S, held, taken
from fedsync.common.run_claim import CHANGE_LOCK, Existing, claim
from fedsync.common.run_claim import RUN_FILE as RUN_FILE
from fedsync.config.cluster import ClusterConfig
from fedsync.config.server_start import ServerStartConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.flower.process_environment import flower_environment
from fedsync.flower.registration import flwr_command, write_connection
from fedsync.identity.certificates import Authority
from fedsync.observe.run_state import SUMMARY
from fedsync.ops.programs import CONNECTION
from fedsync.server.checkpoints import newest_version
from fedsync.server.run_folder import (
    APP,
    DONE_FILE,
    ERROR_FILE,
    PID_FILE,
    RUN_LOCK,
    START_S,
    Phase,
    end_process,
    ends,
    phase,
    write_error,
)

logger = foreign.logger(__name__)

RUNS = "runs"
"""Folder in a server's state folder with all its runs, or links to them."""

STOPPED = "stopped by the operator"

STRATEGY_FILE, _SILOS = "strategy.yaml", "silos.yaml"
_LEAVE_S = 30.0
_STOP_WAIT_S = 300.0
_FLWR_S = 120.0
_RUN = re.compile(r"run (\d{5,})", re.IGNORECASE)

_PROJECT = """\
[project]
name = "fedsync-run"
version = "1.0.0"
description = "Wiring of a FedSync run"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedsync"

[tool.flwr.app.components]
serverapp = "fedsync.flower.server_app:app"
clientapp = "fedsync.flower.client_app:app"

[tool.flwr.app.config]
"""


class BusyError(ConfigError):
    """Error of a run that cannot be changed now, because the run is active or another process changes it."""


def connect(config: ServerStartConfig) -> None:
    """Configure the server's connection for Flower's command line, with its state folder as ``FLWR_HOME``."""
    write_connection(Path(config.state), CONNECTION, config.loopback, authority_of(config))


def authority_of(config: ServerStartConfig) -> Path | None:
    return None if config.certificates is None else Authority.at(Path(config.certificates)).certificate


def submit_run(
    config: ServerStartConfig,
    strategy: StrategyConfig,
    out: Path | None = None,
    target_accuracy: float | None = None,
    *,
    overwrite: bool = False,
) -> Path:
    """Start a run on the server; return the folder of its files, by default a new one in the server's state folder.

    Raises `ConfigError` if the server has too few silos for the strategy, the folder is not writable, or it has a run
    (with ``overwrite``: an active run); `RunError` if the server does not accept the run.
    """
    listed = [*config.silos, *(silo for region in config.regions.values() for silo in region)]
    if listed:  # without a list, silos are registered by hand
        part = listed if strategy.silos is None else [silo for silo in listed if silo in strategy.silos]
        strategy.check_silos(part, "the server's file")
    state = private_folder(Path(config.state))
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    folder = (out or state / RUNS / f"{strategy.name}-{stamp}").resolve()
    existing = Existing.NUMBER if out is None else Existing.OVERWRITE if overwrite else Existing.REFUSE
    with writing(folder):
        mine = claim(folder, existing, models=[strategy.initial_model])
    folder = mine.path
    with _changing(folder):
        settings = prepare_run(
            folder,
            folder,
            strategy,
            keys=config.keys or "",
            registered=not config.insecure,
            target_accuracy=target_accuracy,
            regions=config.regions,
        )
        mine.release()  # the run's server process takes the claim
        hand_over(config, folder, settings)
    return folder


def prepare_run(
    folder: Path,
    out: Path,
    strategy: StrategyConfig,
    cluster: ClusterConfig | None = None,
    *,
    keys: str = "",
    registered: bool = True,
    resume: bool = False,
    target_accuracy: float | None = None,
    regions: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, str | float]:
    """Write strategy and silo file of a run; returns the settings of `fedsync.flower.server_app`."""
    (folder / STRATEGY_FILE).write_text(yaml.safe_dump(strategy.model_dump(mode="json")), encoding="utf-8")
    if cluster is not None:
        (folder / _SILOS).write_text(yaml.safe_dump(cluster.model_dump(mode="json")), encoding="utf-8")
    return {
        "strategy": str(folder / STRATEGY_FILE),
        "silos": "" if cluster is None else str(folder / _SILOS),
        "overrides": "",
        "out": str(out),
        "control": str(folder),
        "keys": keys,
        "registered": "yes" if registered else "",
        "regions": json.dumps(regions) if regions else "",
        "resume": "yes" if resume else "",
        "target-accuracy": "" if target_accuracy is None else float(target_accuracy),
    }


def resume_run(config: ServerStartConfig, folder: Path, *, died: bool = False) -> None:
    """Resume a dead or failed run from its newest checkpoint, or from the beginning without a checkpoint.

    With ``died``, resume only a dead run, but neither a failed nor a stopped run.

    Raises:
        BusyError: another process changes the run, the run waits for its start, or its server process lives.
        ConfigError: the folder has no run, the run is finished, or the folder is not writable.
        RunError: the server does not accept the run.
    """
    folder = folder.resolve()
    _read(folder)
    with _changing(folder):
        record = _read(folder)
        _check_idle(folder, died=died)
        if record.number:
            withdraw(record.number, CONNECTION, flower_environment(Path(config.state)))
        stale = {file: file.read_bytes() for name in (ERROR_FILE, SUMMARY) if (file := folder / name).exists()}
        resume = "yes" if newest_version(folder) is not None else ""
        # The folder may have moved since the start, and the server's file may list other relays.
        paths = {"strategy": folder / STRATEGY_FILE, "silos": folder / _SILOS, "out": folder, "control": folder}
        told = {key: str(path) for key, path in paths.items() if record.settings.get(key)}
        told |= {"keys": config.keys or "", "regions": json.dumps(config.regions) if config.regions else ""}
        try:
            # Removed before the submission, because the new server process may write them at once.
            for file in (*stale, folder / PID_FILE):
                file.unlink(missing_ok=True)
            hand_over(config, folder, {**record.settings, **told, "resume": resume})
        except BaseException:
            for file, content in stale.items():  # the run is as it was: a stopped one is not taken for one that died
                write_atomically(file, content)
            raise


def _check_idle(folder: Path, *, died: bool) -> None:
    if (folder / DONE_FILE).exists():
        raise ConfigError(str(folder), "the run has ended", "Start another run")
    now = phase(folder)
    if now is Phase.AT_WORK:
        raise BusyError(str(folder), "the run is at work", "Watch it: `fedsync watch`")
    if now is Phase.WAITING:
        remedy = f"Wait: it is submitted again after {START_S:g} s. Or end it: `fedsync server stop`"
        raise BusyError(str(folder), "the run was submitted, and Flower has not begun it", remedy)
    if died and now is not Phase.DIED:
        raise BusyError(str(folder), "the run has not died", "Resume it with `fedsync server run --resume`")
    if not ends(folder, _LEAVE_S):
        remedy = "Wait until it has; `fedsync server stop` ends it"
        raise BusyError(str(folder), "the run is over, but its server process has not ended", remedy)


def stop_run(folder: Path) -> None:
    """Stop a waiting, active or dead run; only the operator can resume it. Raises `ConfigError` if there is no run, it
    is over, or the folder is not writable, and `RunError` if the server process does not end.
    """
    folder = folder.resolve()
    _read(folder)
    with _changing(folder, _STOP_WAIT_S):
        record = _read(folder)
        if phase(folder) is Phase.OVER and not held(folder / RUN_LOCK):
            remedy = "No action is needed; `fedsync server run --resume` resumes a failed run"
            raise ConfigError(str(folder), "the run is over", remedy)
        if not (folder / ERROR_FILE).exists():
            write_error(folder, RunError(STOPPED))
        end_process(folder)
        if record.number:
            try:
                withdraw(record.number, CONNECTION, flower_environment(record.state))
            except RunError as error:
                logger.warning("Flower does not know yet that the run is over: %s", error)
        # Flower may have started the process meanwhile. The watchdog ends a process that starts later.
        end_process(folder)


@dataclass(frozen=True, slots=True)
class _Record:
    """Content of `RUN_FILE`; ``number`` is Flower's id of the run, ``state`` is the server's state folder."""

    number: str
    state: Path
    settings: dict[str, str | float]


def _read(folder: Path) -> _Record:
    try:
        record, owner = json.loads((folder / RUN_FILE).read_text(encoding="utf-8")), (folder / RUN_FILE).stat().st_uid
        if owner != os.geteuid():  # the server's user could not read what root writes here
            raise ConfigError(str(folder), f"the run belongs to user {owner}", "Run the command as that user")
        return _Record(str(record["number"]), Path(record["state"]), dict(record["settings"]))
    except FileNotFoundError:
        remedy = "Name the folder that `fedsync server run` printed"
        raise ConfigError(str(folder), "the folder has no run of a server", remedy) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        remedy = "Start the run anew, in another folder"
        raise ConfigError(str(folder / RUN_FILE), f"cannot be read: {error!r}", remedy) from error


def _write(folder: Path, record: _Record) -> None:
    told = {"number": record.number, "state": str(record.state), "settings": record.settings}
    write_atomically(folder / RUN_FILE, json.dumps(told, indent=2).encode() + b"\n")


def change_settings(folder: Path, settings: Mapping[str, str | float]) -> None:
    """Change a submitted run's settings for its next resumption; `ConfigError` if there is no run, or it is busy."""
    with _changing(folder):
        record = _read(folder)
        changed = replace(record, settings={**record.settings, **settings})
        if changed != record:
            _write(folder, changed)


@contextmanager
def _changing(folder: Path, wait_s: float = PATIENCE_S) -> Iterator[None]:
    with writing(folder), taken(folder / CHANGE_LOCK, wait_s) as alone:
        if not alone:
            problem = "the run is being resumed or stopped by somebody else, perhaps by `fedsync server start`"
            raise BusyError(str(folder), problem, "Try again in a minute")
        yield


def hand_over(config: ServerStartConfig, folder: Path, settings: dict[str, str | float]) -> None:
    """Submit a run with the settings of `prepare_run`. Raises `RunError` if the server does not accept the run."""
    app, number = folder / APP, ""
    shutil.rmtree(app, ignore_errors=True)
    connect(config)
    environment = flower_environment(Path(config.state))
    _list(Path(config.state), folder)
    try:
        number = submit(write_bundle(app, settings), CONNECTION, environment)
        _write(folder, _Record(number, Path(config.state).resolve(), settings))
    except (FedSyncError, OSError):
        shutil.rmtree(app, ignore_errors=True)  # `phase` takes this folder as the sign of a submitted run
        if number:
            with contextlib.suppress(RunError):
                withdraw(number, CONNECTION, environment)
        raise
    logger.info("run %s: %s", number, folder)


def _list(state: Path, folder: Path) -> None:
    """Link a run from outside the state folder, so that the watchdog finds the run."""
    runs = state.resolve() / RUNS
    if folder.parent == runs:
        return
    runs.mkdir(exist_ok=True)
    link = runs / f"{folder.name}-{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"
    if not link.is_symlink():
        link.symlink_to(folder)


def write_bundle(folder: Path, settings: Mapping[str, str | float]) -> Path:
    folder.mkdir(parents=True)
    # JSON strings and numbers are valid TOML, but TOML knows no pairs of surrogates.
    lines = "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in settings.items())
    (folder / "pyproject.toml").write_text(_PROJECT + lines, encoding="utf-8")
    return folder


def submit(bundle: Path, connection: str, environment: Mapping[str, str]) -> str:
    """Submit the app to the SuperLink; return Flower's run id, or "" if Flower prints none; `RunError` if it fails."""
    done = _flwr("run", str(bundle), connection, environment=environment)
    if done.returncode != 0:
        told = " ".join(re.sub(r"[\u2500-\u257f]", " ", done.stdout + done.stderr).split())
        remedy = "`fedsync doctor --server server.yaml` shows whether the server works; if not, start it"
        raise RunError(f"the server did not accept the run: {told or f'status {done.returncode}'}. {remedy}")
    found = _RUN.search(done.stdout)
    return found.group(1) if found else ""


def withdraw(number: str, connection: str, environment: Mapping[str, str]) -> None:
    """Mark a run as ended at the SuperLink, for a ServerApp that died or must not start; idempotent.

    The SuperLink itself needs a minute to notice, during which a SuperNode may wait for the rest of a message. Raises
    `RunError` if Flower's command line fails to start or to end.
    """
    _flwr("stop", number, connection, environment=environment)


def _flwr(*arguments: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            [flwr_command(), *arguments],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_FLWR_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RunError(f"flwr {arguments[0]} did not end within {_FLWR_S:g} s") from error
    except OSError as error:
        raise RunError(f"flwr {arguments[0]} could not be started: {error}") from error
