"""Reader of JSON files in a run's folder, which may come from another machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedsync.common.errors import ConfigError


def read_object(path: Path, *keys: str) -> dict[str, Any] | None:
    """Read a JSON object; None if the file is missing.

    Raises:
        ConfigError: the file is not JSON, not an object, or lacks a key.
    """
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(str(path), f"not JSON: {error}", "Run it again") from error
    if not isinstance(value, dict) or not set(keys) <= value.keys():
        raise ConfigError(str(path), "not what a run writes", "Name the folder of a run, or run it again")
    return value
