"""Environment variables of Flower's processes, which must be set before flwr is imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from fedsync.common.processes import OWNER
from fedsync.common.proxies import unproxied
from fedsync.silo.protocol import STATE, STATE_FOLDER

QUIET = {
    # Flower's programs must not import modules from the folder in which they are started.
    "PYTHONSAFEPATH": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    # Otherwise Ray tries to reach a metrics service, and prints messages about it.
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def flower_environment(home: Path) -> Mapping[str, str]:
    """Environment of a Flower process and its children; folder ``home`` has its configuration, apps and trainers."""
    # Flower starts its helpers by name; they are in the interpreter's folder.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    mine = {**os.environ, **unproxied(os.environ)}
    return {**mine, **QUIET, **trainer_environment(home), "FLWR_HOME": str(home), "PATH": path}


def trainer_environment(home: Path) -> Mapping[str, str]:
    """Return variables that place resident trainers in ``home`` and end them with this process."""
    return {STATE: str(home / STATE_FOLDER), OWNER: str(os.getpid())}


@contextmanager
def flower_in_this_process(home: Path) -> Iterator[None]:
    """Keep Flower in this process, and its child processes, from telemetry and from installing packages."""
    ours = {**unproxied(os.environ), **QUIET, **trainer_environment(home)}
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
