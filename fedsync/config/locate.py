"""Location of files by path or shipped name, and of paths relative to a file."""

from __future__ import annotations

from pathlib import Path

from fedsync.common.errors import ConfigError
from fedsync.common.names import near_miss

_PACKAGE = Path(__file__).resolve().parents[1]


def shipped_folder() -> Path:
    inside = _PACKAGE / "strategies"
    return inside if inside.is_dir() else _PACKAGE.parent / "strategies"


def locate(name: str | Path, kind: str = "") -> Path:
    """Return the path of a file, given by path or by the bare name of a shipped file in the subfolder ``kind``. Raises
    `ConfigError` if neither exists, or it is no regular, readable file.
    """
    path = Path(name)
    try:
        if path.is_file():
            return path.resolve()
        if path.exists() and not path.is_dir():
            problem = "a pipe or a device, but FedSync reads this file more than once"
            raise ConfigError(str(name), problem, "Save its content as a file")
    except OSError as error:
        raise ConfigError(str(name), error.strerror or str(error), "Check the path and its permissions") from error
    folder = shipped_folder() / kind
    found = [*folder.glob("*.yaml"), *folder.glob("paper/*.yaml")]
    shipped = {file.relative_to(folder).with_suffix("").as_posix(): file for file in sorted(found)}
    if str(name) in shipped:
        return shipped[str(name)]
    raise ConfigError(str(name), "no such file", near_miss(str(name), shipped) + ", or a path to a YAML file")


def beside(file: Path, name: str, place: str) -> Path:
    """Resolve ``name`` relative to the folder of ``file``; raises `ConfigError` at ``place`` for an invalid path."""
    try:
        return (file.resolve().parent / name).resolve()
    # ValueError: a null character; RuntimeError: a loop of symbolic links.
    except (ValueError, RuntimeError) as error:
        raise ConfigError(place, f"{name!r} cannot be a path: {error}", "Write a path") from error
