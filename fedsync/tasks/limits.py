"""Complaints about options that are out of range, for tasks made without a file that was checked before."""

from __future__ import annotations

from fedsync.common.errors import ConfigError


def at_least(place: str, value: float, limit: float) -> None:
    if not value >= limit:
        raise ConfigError(place, f"{value} is below {limit}", f"Write {limit} or more")


def above(place: str, value: float, limit: float) -> None:
    if not value > limit:
        raise ConfigError(place, f"{value} is not above {limit}", f"Write more than {limit}")
