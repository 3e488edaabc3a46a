"""Availability window that a silo reports. Durations only, so clocks of different machines are never compared."""

from __future__ import annotations

from dataclasses import dataclass

MAX_AWAY_S = 3 * 86_400.0
"""Upper bound of both durations of a daily window [s]: a lost hour (summer time) may skip a daily window."""


@dataclass(frozen=True, slots=True)
class Presence:
    """Time left in a silo's window (``left_s``, 0 outside) and until its next window, relative to the report."""

    left_s: float
    back_s: float

    @property
    def sound(self) -> bool:
        """Whether the durations are possible for a daily window; NaN fails every comparison."""
        return 0 <= self.left_s <= self.back_s <= MAX_AWAY_S
