"""Find a file by path, or a shipped one by name."""

from __future__ import annotations

from pathlib import Path

from fedsync.config.section import near_miss
from fedsync.core.errors import ConfigError

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
        ConfigError: neither exists; lists what is shipped.
    """
    path = Path(name)
    if path.is_file():
        return path.resolve()
    folder = shipped_folder() / kind
    shipped = {file.stem: file for file in sorted(folder.glob("*.yaml"))}
    if str(name) in shipped:
        return shipped[str(name)]
    raise ConfigError(str(name), "no such file", near_miss(str(name), shipped) + ", or a path to a YAML file")
