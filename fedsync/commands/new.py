"""``fedsync new``: a small working project to start from."""

from __future__ import annotations

import shlex
import shutil
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fedsync.common.errors import ConfigError
from fedsync.observe.terminal import say

TEMPLATES = Path(__file__).resolve().parents[1] / "templates"
"""A folder of files for each kind of task, besides ``shared``, which all projects get."""


class TaskKind(StrEnum):
    """What the project's task predicts."""

    CLASSES = "classes"
    NUMBERS = "numbers"


def new(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the project; made if it is not there.")],
    task: Annotated[TaskKind, typer.Option("--task", help="What the task predicts.")] = TaskKind.CLASSES,
) -> None:
    """Make a small working project: a task of your own, a strategy, silos, and how to run them."""
    files = make_project(folder, task)
    say(f"{folder}: {', '.join(str(file) for file in files)}")
    say("Try it:")
    say(f"  cd {shlex.quote(str(folder))}")
    say("  fedsync run strategy.yaml --silos silos.yaml --runtime virtual --out runs/virtual")
    say("README.md goes on from there.")


def make_project(folder: Path, task: TaskKind) -> list[Path]:
    """Write a project's files into a folder that is empty or not there.

    Returns:
        The files, relative to the folder, sorted.

    Raises:
        ConfigError: the folder has something in it, or cannot be made or written.
    """
    try:
        if folder.is_dir() and any(folder.iterdir()):
            raise ConfigError(str(folder), "the folder is not empty", "Name one that is, or that is not there yet")
        folder.mkdir(parents=True, exist_ok=True)
        written = [file for source in ("shared", task.value) for file in _copy(TEMPLATES / source, folder)]
    except OSError as error:
        problem = f"the project cannot be written: {error.strerror or error}"
        raise ConfigError(str(folder), problem, "Name a folder that you may make and write") from error
    return sorted(written)


def _copy(source: Path, folder: Path) -> list[Path]:
    """Copy the files below ``source``; what an installer may have compiled beside them stays behind."""
    found = [path.relative_to(source) for path in source.rglob("*") if path.is_file()]
    files = [file for file in found if "__pycache__" not in file.parts]
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        # Not the modes: the package's own files may be read-only.
        shutil.copyfile(source / file, folder / file)
    return files
