"""Range checks of options, for tasks that are built without a checked strategy file."""

from __future__ import annotations

from fedsync.common.errors import ConfigError


def at_least(place: str, value: float, limit: float) -> None:
    if not value >= limit:
        raise ConfigError(place, f"{value} is below {limit}", f"Write {limit} or more")


def above(place: str, value: float, limit: float) -> None:
    if not value > limit:
        raise ConfigError(place, f"{value} is not above {limit}", f"Write more than {limit}")
