"""Waiting: exponential backoff between retries, and a wait with a timeout."""

from __future__ import annotations

import time
from collections.abc import Callable
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


def wait_until(done: Callable[[], bool], most_s: float, pause_s: float) -> bool:
    """Call ``done`` every ``pause_s`` [s] until it returns True; return False after ``most_s`` [s]."""
    end_s = time.monotonic() + most_s
    while not done():
        if time.monotonic() >= end_s:
            return False
        time.sleep(pause_s)
    return True
