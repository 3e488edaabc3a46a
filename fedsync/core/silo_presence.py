"""What a silo says of when it is there. Durations only: nobody's clock is compared with another's."""

from __future__ import annotations

from dataclasses import dataclass

MAX_AWAY_S = 3 * 86_400.0
"""Seconds until a window of each day ends, or the next one begins, at the most: a day may be skipped with an hour."""


@dataclass(frozen=True, slots=True)
class Presence:
    """A silo's window, counted from the moment at which it speaks.

    Args:
        left_s: how long it is still there [s]; 0 outside of its window.
        back_s: how long it is until the next window begins [s].
    """

    left_s: float
    back_s: float

    @property
    def sound(self) -> bool:
        """Whether a window of each day can be so. A comparison with NaN is false."""
        return 0 <= self.left_s <= self.back_s <= MAX_AWAY_S
