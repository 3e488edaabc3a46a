"""Names of silos."""

from __future__ import annotations

import re

from fedsync.core.errors import ConfigError

SILO_NAME = r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}$"
"""What a silo may be called where its name also names a file."""


def check_silo_name(name: str) -> str:
    """The name, if it can name a file.

    Raises:
        ConfigError: it cannot.
    """
    if not re.fullmatch(SILO_NAME, name):
        remedy = "Use 1 to 64 letters, digits, dots, dashes and underscores, not beginning with a dot"
        raise ConfigError("silo name", f"{name[:80]!r} is not allowed", remedy)
    return name
