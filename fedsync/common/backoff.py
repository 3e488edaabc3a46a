"""Pauses that grow from one try to the next."""

from __future__ import annotations

from dataclasses import dataclass

_MOST_GROWTHS = 64


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pause before another try: ``first_s`` at first, ``factor`` times as long each time, up to ``longest_s``.

    Args:
        first_s: shortest pause [s].
        longest_s: longest pause [s].
        factor: growth a try, at least 1.
    """

    first_s: float
    longest_s: float
    factor: float = 2.0

    def pause_s(self, tries: int) -> float:
        """Pause [s] after a try that ``tries`` others went before."""
        # Bounded, for a power of many thousand is no float any more.
        return min(self.longest_s, self.first_s * self.factor ** min(tries, _MOST_GROWTHS))
