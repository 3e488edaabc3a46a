"""Settings for a user's own training code: Flower's ``train_config`` and ``evaluate_config``."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Annotated, Any

from pydantic import BeforeValidator

MOST_ENTRIES = 64
"""Maximum number of entries; they travel with every message."""

LONGEST_KEY, LONGEST_TEXT = 128, 1024
"""Maximum number of characters in a key, and in a text value."""


def _checked(data: Any) -> Any:
    """Return the data if valid; data that is not a mapping is left for pydantic to refuse."""
    if not isinstance(data, Mapping):
        return data
    if len(data) > MOST_ENTRIES:
        raise ValueError(f"there are {len(data)} entries, at most {MOST_ENTRIES}; keep fewer here")
    for key, value in data.items():
        if not isinstance(key, str) or not 1 <= len(key) <= LONGEST_KEY:
            raise ValueError(f"the key {key!s:.40} is not text of 1 to {LONGEST_KEY} characters; write another")
        if not isinstance(value, bool | int | float | str):
            raise ValueError(f"{key:.40} is {type(value).__name__}; write a number, text, true or false")
        if isinstance(value, str) and len(value) > LONGEST_TEXT:
            raise ValueError(f"{key:.40} has {len(value)} characters, at most {LONGEST_TEXT}; write less")
        if isinstance(value, float) and not isfinite(value):
            raise ValueError(f"{key:.40} is {value}; write a finite number")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError(f"{key:.40} has more than 64 bits; write a smaller number")
    return dict(data)


UserConfig = Annotated[dict[str, bool | int | float | str], BeforeValidator(_checked)]
"""Numbers, text and booleans by name, within the size limits of messages."""
