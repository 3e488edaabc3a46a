"""The Flower app that a silo was sent: task files are looked up there first, so that an app may name its own."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedsync.config.run_spec import RunSpec

APP = "FEDSYNC_APP"
"""Names the folder of the Flower app for a trainer, to whoever starts one."""

_MANIFEST = "pyproject.toml"


def announced(path: Iterable[str], apps: Path) -> str:
    """The folder of the Flower app that a process was started with, of those that it imports from; empty for none.

    Args:
        path: folders that it imports from; Flower has that of the app among them.
        apps: where Flower unpacks apps. One that is there goes before others: Ray has the folder in ``sys.path`` in
            which the SuperLink was started, and an older copy of the app may be in that.
    """
    folders = [Path(entry).resolve() for entry in path if entry and (Path(entry) / _MANIFEST).is_file()]
    folders.sort(key=lambda folder: folder.parent != apps.resolve())
    return str(folders[0]) if folders else ""


def unpacked(spec: RunSpec) -> RunSpec:
    """The run, with those paths of its task resolved at which the Flower app has something."""
    folder = os.environ.get(APP)
    if folder is None:
        return spec

    def located(path: str) -> str:
        inside = Path(folder) / path
        return str(inside) if inside.exists() else path

    return spec.model_copy(update={"task": spec.task.relocated(located)})
