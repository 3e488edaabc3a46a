"""Lookup of task files in the Flower app that a silo received, before any other folder."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedsync.config.run_spec import RunSpec

APP = "FEDSYNC_APP"  # environment variable of a trainer: folder of the Flower app

_MANIFEST = "pyproject.toml"


def announced(path: Iterable[str], apps: Path) -> str:
    """Return the folder of this process's Flower app among the folders of ``path``; empty for none.

    A folder in ``apps``, where Flower unpacks apps, takes precedence: Ray puts the SuperLink's start folder into
    ``sys.path``, which may hold an older copy of the app.
    """
    folders = [Path(entry).resolve() for entry in path if entry and (Path(entry) / _MANIFEST).is_file()]
    folders.sort(key=lambda folder: folder.parent != apps.resolve())
    return str(folders[0]) if folders else ""


def unpacked(spec: RunSpec) -> RunSpec:
    """Return the run with those paths of its task resolved that exist in the Flower app."""
    folder = os.environ.get(APP)
    if folder is None:
        return spec

    def located(path: str) -> str:
        inside = Path(folder) / path
        return str(inside) if inside.exists() else path

    return spec.model_copy(update={"task": spec.task.relocated(located)})
