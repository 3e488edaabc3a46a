"""Schedule of a part-time silo's processes, by the availability window that the silo's owner sets."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

from fedsync.config.sections.presence import PresenceConfig, utc_now

SETTLE_S = 30.0
"""Time that a leaving silo stays after its last order [s], so that its update can be sent."""


class PresenceWatch:
    """Presence of a silo: during its window, and afterwards until its order is done or the grace period is over."""

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

    def should_run(self) -> bool:
        """Return True if the silo's processes should run now; call this periodically."""
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
        """Return the end of the presence, or the next begin, for the health file."""
        if self._window is None:
            return {}
        now = self._now()
        left_s = self._window.left_s(now)
        at = now + timedelta(seconds=left_s or self._window.next_s(now))
        return {"presence": {"until" if left_s else "next": at.isoformat(timespec="seconds")}}
