"""Exponential backoff: growing pauses between retries."""

from __future__ import annotations

from dataclasses import dataclass

_MOST_GROWTHS = 64


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pause before a retry: ``first_s``, then ``factor`` (at least 1) times as long each time, up to ``longest_s``."""

    first_s: float
    longest_s: float
    factor: float = 2.0

    def pause_s(self, tries: int) -> float:
        # Bounded, because a very large power overflows a float.
        return min(self.longest_s, self.first_s * self.factor ** min(tries, _MOST_GROWTHS))
