"""Position of a silo in its own data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cursor:
    """Progress of a silo that must survive a restart.

    Args:
        epoch: completed passes over the data.
        position: samples of the current pass already taken.
        state: JSON that the silo's own training code keeps between orders.
        private: model parts that stay at the silo; see `fedsync.train.module_parts.PrivateParts`.
    """

    epoch: int = 0
    position: int = 0
    state: str = "{}"
    private: bytes = b""
