"""Command ``fedsync new``: creation of a small working project."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Annotated

import typer

from fedsync.common.errors import ConfigError
from fedsync.observe.terminal import say

PROJECT = Path(__file__).resolve().parent / "templates"


def new(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the project; made if it is not there.")],
) -> None:
    """Make a small working project: your own task, a strategy, silos, and instructions."""
    files = make_project(folder)
    say(f"{folder}: {', '.join(str(file) for file in files)}")
    say("Try it:")
    say(f"  cd {shlex.quote(str(folder))}")
    say("  fedsync run strategy.yaml --silos silos.yaml --runtime virtual --out runs/virtual")
    say("README.md goes on from there.")


def make_project(folder: Path) -> list[Path]:
    """Write a project's files into an empty or new folder.

    Returns:
        Paths of the files, relative to the folder, sorted.

    Raises:
        ConfigError: the folder is not empty, or cannot be made or written.
    """
    found = (path.relative_to(PROJECT) for path in PROJECT.rglob("*") if path.is_file())
    files = sorted(file for file in found if "__pycache__" not in file.parts)
    try:
        if folder.is_dir() and any(folder.iterdir()):
            raise ConfigError(str(folder), "the folder is not empty", "Name one that is, or that is not there yet")
        for file in files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            # Without the modes: the package's own files may be read-only.
            shutil.copyfile(PROJECT / file, folder / file)
    except OSError as error:
        problem = f"the project cannot be written: {error.strerror or error}"
        raise ConfigError(str(folder), problem, "Name a folder that you may make and write") from error
    return files
