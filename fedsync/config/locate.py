"""Find a file by path, or a shipped one by name; and what a file names relative to itself."""

from __future__ import annotations

from pathlib import Path

from fedsync.common.errors import ConfigError
from fedsync.common.names import near_miss

BY_NAME = "data:"
"""Begins a path of a task that is a name instead: each silo has a path of its own for it, in ``data``."""

_PACKAGE = Path(__file__).resolve().parents[1]


def shipped_folder() -> Path:
    """The folder of the shipped strategies: inside the wheel, or beside the package in a checkout."""
    inside = _PACKAGE / "strategies"
    return inside if inside.is_dir() else _PACKAGE.parent / "strategies"


def locate(name: str | Path, kind: str = "") -> Path:
    """Path of a file.

    Args:
        name: a path, or the bare name of a shipped file.
        kind: subfolder of shipped files, for example ``silos``.

    Raises:
        ConfigError: neither exists; lists what is shipped. Or the path cannot be used.
    """
    path = Path(name)
    try:
        if path.is_file():
            return path.resolve()
        if path.exists() and not path.is_dir():
            problem = "a pipe or a device, and this file is read more than once"
            raise ConfigError(str(name), problem, "Save it as a file")
    except OSError as error:
        raise ConfigError(str(name), error.strerror or str(error), "Check the path and its permissions") from error
    folder = shipped_folder() / kind
    shipped = {file.stem: file for file in sorted(folder.glob("*.yaml"))}
    if str(name) in shipped:
        return shipped[str(name)]
    raise ConfigError(str(name), "no such file", near_miss(str(name), shipped) + ", or a path to a YAML file")


def beside(file: Path, name: str, place: str) -> Path:
    """The path that a file calls ``name``, relative to the folder it lies in; something may be there or not.

    Args:
        file: has the name in it.
        name: relative or absolute.
        place: where in the file it stands, for the message.

    Raises:
        ConfigError: no path can be called that, or links lead in a circle.
    """
    try:
        return (file.resolve().parent / name).resolve()
    # ValueError: a null character; RuntimeError: the circle.
    except (ValueError, RuntimeError) as error:
        raise ConfigError(place, f"{name!r} cannot be a path: {error}", "Write a path") from error
