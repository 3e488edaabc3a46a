"""Names of silos, and what a misspelt name was probably meant to be."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from fedsync.common.errors import ConfigError

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


def near_miss(word: str, allowed: Iterable[str]) -> str:
    """``Did you mean 'x'?`` where something close is allowed, and the list of what is."""
    options = sorted(allowed)
    close = difflib.get_close_matches(word, options, n=1)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    return f"{hint}Allowed: {', '.join(options)}"
