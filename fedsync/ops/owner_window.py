"""Whether a silo is to be there now, by its owner's window."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

from fedsync.config.sections.presence import PresenceConfig, utc_now

SETTLE_S = 30.0
"""How long after its last order a silo that is to leave stays [s]: its update goes out meanwhile."""


class PresenceWatch:
    """Knows whether a silo is there: in its window, and after it until what is in work is done, or the grace is over.

    Args:
        window: None where the silo is always there.
        working: whether an order is in work.
        now: the present, with its zone.
        clock: seconds that only go up.
    """

    def __init__(
        self,
        window: PresenceConfig | None,
        working: Callable[[], bool],
        now: Callable[[], datetime] = utc_now,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._window, self._working, self._now, self._clock = window, working, now, clock
        self._here = False
        self._closed_s: float | None = None
        self._busy_s = 0.0

    def here(self) -> bool:
        """Whether its processes are to run; asked again and again."""
        if self._window is None:
            return True
        now_s = self._clock()
        if self._window.left_s(self._now()) > 0:
            self._here, self._closed_s = True, None
        elif self._here:
            if self._closed_s is None:
                self._closed_s = self._busy_s = now_s
            if self._working():
                self._busy_s = now_s
            grace_s = self._window.grace_s
            self._here = now_s - self._closed_s < grace_s and now_s - self._busy_s < SETTLE_S
        return self._here

    def told(self) -> Mapping[str, Any]:
        """For the health file: until when the silo is there, or when it will be."""
        if self._window is None:
            return {}
        now = self._now()
        left_s = self._window.left_s(now)
        at = now + timedelta(seconds=left_s or self._window.next_s(now))
        return {"presence": {"until" if left_s else "next": at.isoformat(timespec="seconds")}}
