"""What Flower's processes are told by environment variables. To be set before flwr is imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    # Ray would try to reach a metrics service and print about it.
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def flower_environment(home: Path) -> Mapping[str, str]:
    """The environment of a Flower process with a home folder of its own.

    Args:
        home: folder for Flower's configuration and app bundles.
    """
    # Flower starts its helpers by name, and they stand beside the interpreter.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**os.environ, **QUIET, "FLWR_HOME": str(home), "PATH": path}


def set_quiet() -> None:
    """Keep Flower in this process from calling home or installing anything."""
    os.environ.update(QUIET)
