"""How a run's server process tells others how it is: files in a folder. Light, for those who only look."""

from __future__ import annotations

import json
from pathlib import Path

from fedsync.common.files import write_atomically
from fedsync.core.errors import ConfigError, FedSyncError, RunError

PID_FILE, ERROR_FILE, DONE_FILE, RUN_LOCK = "server.pid", "error.json", "done", "server.lock"
"""Its number; why the run failed; that all of the run's files are written; the last is locked while it lives."""


def write_error(control: Path, error: FedSyncError) -> None:
    """Leave the reason for which a run ended."""
    if isinstance(error, ConfigError):
        told = {"kind": "config", "place": error.place, "problem": error.problem, "remedy": error.remedy}
    else:
        told = {"kind": "run", "message": str(error)}
    write_atomically(control / ERROR_FILE, json.dumps(told).encode())


def read_error(control: Path) -> ConfigError | RunError:
    """The error that `write_error` left."""
    told = json.loads((control / ERROR_FILE).read_text(encoding="utf-8"))
    if told["kind"] == "config":
        return ConfigError(told["place"], told["problem"], told["remedy"])
    return RunError(told["message"])
