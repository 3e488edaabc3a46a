"""Files in a run's folder: process id of the server process, state of the run, and address of the run's hub."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any

from fedsync.common.errors import ConfigError, FedSyncError, RunError
from fedsync.common.files import OWNER_FILE, write_atomically
from fedsync.common.locks import held, wait_until
from fedsync.common.run_claim import DONE_FILE as DONE_FILE
from fedsync.common.run_claim import ERROR_FILE as ERROR_FILE
from fedsync.common.run_claim import RUN_LOCK as RUN_LOCK

PID_FILE = "server.pid"

APP = "app"
"""Subfolder with the Flower app of the run, while the run is submitted."""

START_S = 300.0
"""Time within which Flower must start the server process of a run [s]; later, the process counts as dead."""

_BEGIN_S, _END_S = 5.0, 10.0
_PAUSE_S = 0.05


class Phase(Enum):
    """State of a run, as its folder shows it."""

    WAITING = auto()
    """Flower has not started the server process."""

    AT_WORK = auto()
    OVER = auto()
    DIED = auto()


def phase(folder: Path) -> Phase:
    # In this order: a process writes its last files before it releases its lock.
    alive = held(folder / RUN_LOCK)
    if (folder / DONE_FILE).exists() or (folder / ERROR_FILE).exists():
        return Phase.OVER
    if alive:
        return Phase.AT_WORK
    with suppress(FileNotFoundError):
        # The absolute value keeps a clock that was set back from prolonging the wait.
        just_submitted = abs(time.time() - (folder / APP).stat().st_mtime) < START_S
        if just_submitted and not (folder / PID_FILE).exists():
            return Phase.WAITING
    # The process may have begun meanwhile.
    return Phase.AT_WORK if held(folder / RUN_LOCK) else Phase.DIED


def write_error(control: Path, error: FedSyncError) -> None:
    if isinstance(error, ConfigError):
        told = {"kind": "config", "place": error.place, "problem": error.problem, "remedy": error.remedy}
    else:
        told = {"kind": "run", "message": str(error)}
    write_atomically(control / ERROR_FILE, json.dumps(told).encode(), OWNER_FILE)


def read_error(control: Path) -> ConfigError | RunError:
    told = json.loads((control / ERROR_FILE).read_text(encoding="utf-8"))
    if told["kind"] == "config":
        return ConfigError(told["place"], told["problem"], told["remedy"])
    return RunError(told["message"])


def end_process(folder: Path) -> None:
    """End the server process of a run, if it lives: SIGTERM, then SIGKILL. Raises `ConfigError` if the process belongs
    to another user, and `RunError` if it does not end.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        # The process takes the lock before it writes its process id.
        if ends(folder, _BEGIN_S, lambda: (folder / PID_FILE).exists()):
            return
        try:
            os.kill(int((folder / PID_FILE).read_text(encoding="utf-8")), number)
        except (ProcessLookupError, FileNotFoundError):
            pass  # the process has just ended, or has not written its process id
        except PermissionError:
            remedy = "Stop it as the user that runs `fedsync server start`"
            raise ConfigError(str(folder), "the server process belongs to another user", remedy) from None
        if ends(folder, _END_S):
            return
    raise RunError(f"the server process of the run in {folder} does not end")


def ends(folder: Path, wait_s: float, enough: Callable[[], bool] = lambda: False) -> bool:
    wait_until(lambda: not held(folder / RUN_LOCK) or enough(), wait_s, _PAUSE_S)
    return not held(folder / RUN_LOCK)


def struck_silos(file: Path) -> set[str]:
    """Names of silos that active runs reject; none without a file. `ConfigError` if the file is damaged."""
    try:
        return {str(name) for name in json.loads(file.read_text(encoding="utf-8"))}
    except FileNotFoundError:
        return set()
    except (ValueError, TypeError) as error:
        remedy = "Remove it, and repeat `fedsync server revoke` for silos that active runs must reject"
        raise ConfigError(str(file), f"cannot be read: {error}", remedy) from None


HUB = "FEDSYNC_HUB"
"""Environment variable of a ServerApp: path of its `HubPlace`; without it, the ServerApp uses Flower's messages."""


@dataclass(frozen=True, slots=True)
class HubPlace:
    """Address of the hub of a run, which the server writes to a file for its ServerApps.

    Args:
        ports: candidate ports of ``host``, of which the first free port is taken; 0 for any port.
        name: host name for silos.
        certificate: PEM file of the server's certificate, with its ``key``; empty for no TLS.
        authority: PEM file of the CA certificate.
        struck: JSON file with the names of refused silos; empty for none.
        proxy: ``host:port`` of a proxy that forwards ``/v1/fedsync/RUN/``; empty for none.
        sockets: folder of the sockets ``RUN.sock`` to which the proxy forwards.
    """

    host: str = "127.0.0.1"
    ports: tuple[int, ...] = (0,)
    name: str = "127.0.0.1"
    certificate: str = ""
    key: str = ""
    authority: str = ""
    struck: str = ""
    proxy: str = ""
    sockets: str = ""

    def save(self, path: Path) -> None:
        write_atomically(path, json.dumps(asdict(self)).encode(), OWNER_FILE)

    @classmethod
    def load(cls, path: Path) -> HubPlace:
        """Read the file of `save`; `ConfigError` if it is missing or invalid."""
        try:
            found: Any = json.loads(path.read_text(encoding="utf-8"))
            return cls(**{**found, "ports": tuple(found["ports"])})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(HUB, f"{path} cannot be read: {error}", "Let `fedsync server start` write it") from None
