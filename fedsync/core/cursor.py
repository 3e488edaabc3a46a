"""A silo's place in its own data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cursor:
    """Position of a silo in its own data: all that must survive a restart.

    Args:
        epoch: passes over the data that are complete.
        position: samples of the current pass already taken.
        state: what a silo's own training code keeps from one order to the next, as JSON.
        private: parts of the model that stay at the silo; see `fedsync.train.private.PrivateParts`.
    """

    epoch: int = 0
    position: int = 0
    state: str = "{}"
    private: bytes = b""
