"""Silo names: their validation, suggestions for misspelt ones, and counts of each in a text."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

from fedsync.common.errors import ConfigError

SILO_NAME = r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}$"
"""Pattern of silo names that also name files."""


def check_silo_name(name: str) -> str:
    if not re.fullmatch(SILO_NAME, name):
        remedy = "Use 1 to 64 letters, digits, dots, dashes and underscores, not beginning with a dot"
        raise ConfigError("silo name", f"{name[:80]!r} is not allowed", remedy)
    return name


def told(counts: Mapping[str, int]) -> str:
    """Return for example ``b 2 times, c 1 times``: the most frequent first."""
    often = sorted(counts.items(), key=lambda one: (-one[1], one[0]))
    return ", ".join(f"{name} {count} times" for name, count in often)


def near_miss(word: str, allowed: Iterable[str]) -> str:
    options = sorted(allowed)
    close = difflib.get_close_matches(word, options, n=1)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    return f"{hint}Allowed: {', '.join(options)}"
