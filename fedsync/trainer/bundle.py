"""The Flower app that a silo was sent: task files are looked up there first, so that an app may name its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedsync.config.run_spec import RunSpec

APP = "FEDSYNC_APP"
"""Names the folder of the Flower app for a trainer, to whoever starts one."""

_MANIFEST = "pyproject.toml"


def announce() -> None:
    """Say to trainers that this process starts where its Flower app is; Flower has that folder in ``sys.path``."""
    folder = next((entry for entry in sys.path if entry and (Path(entry) / _MANIFEST).is_file()), None)
    if folder is not None:
        os.environ[APP] = str(Path(folder).resolve())


def unpacked(spec: RunSpec) -> RunSpec:
    """The run, with those paths of its task resolved at which the Flower app has something."""
    folder = os.environ.get(APP)
    if folder is None:
        return spec

    def located(path: str) -> str:
        inside = Path(folder) / path
        return str(inside) if inside.exists() else path

    return spec.model_copy(update={"task": spec.task.relocated(located)})
