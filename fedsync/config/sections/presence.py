"""Daily availability windows of part-time silos, by the clock of a time zone."""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta
from typing import Annotated, Self
from zoneinfo import ZoneInfo

from pydantic import Field, PrivateAttr, model_validator

from fedsync.config.sections.section import Section
from fedsync.core.orders import Presence

_TIME = r"^([01][0-9]|2[0-3]):[0-5][0-9]$"
_DAYS = (-1, 0, 1, 2)
"""Days, relative to today, whose windows can contain the present or begin next; a clock change can skip a window."""


class PresenceConfig(Section):
    """Daily window in which a silo takes orders."""

    begin: Annotated[str, Field(pattern=_TIME)]
    """Beginning of the window, such as ``"22:00"`` (in quotes)."""

    until: Annotated[str, Field(pattern=_TIME)]
    """End of the window, on the same day or, if the time is earlier than ``begin``, on the next day."""

    zone: Annotated[str, Field(min_length=1)]
    """Time zone of both times, such as ``Europe/Berlin``; daylight saving follows from it."""

    grace_s: Annotated[float, Field(ge=0, le=86_400)] = 300.0
    """Time after the window in which an order in progress may finish [s]; then the silo gives up the order."""

    _zone: ZoneInfo = PrivateAttr()

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.begin == self.until:
            raise ValueError("begin and until are the same; leave presence out for a silo that is always there")
        try:
            self._zone = ZoneInfo(self.zone)
        except (OSError, ValueError, KeyError):  # a ZoneInfoNotFoundError is a KeyError
            raise ValueError(
                f"no zone {self.zone!r} is known here; write one such as Europe/Berlin, or UTC, or install tzdata if "
                "the system knows none"
            ) from None
        return self

    def left_s(self, now: datetime) -> float:
        """Remaining time of the window at ``now``, which needs a time zone [s]; 0 outside the window."""
        return max((end - now).total_seconds() if begin <= now < end else 0.0 for begin, end in self._windows(now))

    def next_s(self, now: datetime) -> float:
        return 0.0 if self.left_s(now) > 0 else self._following_s(now)

    def told(self, now: datetime) -> Presence:
        """Availability that the server receives: durations, and no time of any clock."""
        return Presence(self.left_s(now), self._following_s(now))

    def _following_s(self, now: datetime) -> float:
        return min((begin - now).total_seconds() for begin, end in self._windows(now) if now < begin < end)

    def _windows(self, now: datetime) -> list[tuple[datetime, datetime]]:
        """Windows around ``now`` in UTC, where differences are right even if a clock change skips or repeats hours."""
        begin, end = time.fromisoformat(self.begin), time.fromisoformat(self.until)
        today = now.astimezone(self._zone).date()
        found = []
        for number in _DAYS:
            first = today + timedelta(days=number)
            last = first + timedelta(days=end < begin)
            # Where the clock shows a time twice, the window begins at the first and ends at the second. A time that
            # the clock skips is as long after midnight as on other days.
            opens = datetime.combine(first, begin, self._zone).astimezone(UTC)
            closes = max(datetime.combine(last, end.replace(fold=fold), self._zone).astimezone(UTC) for fold in (0, 1))
            found.append((opens, closes))
        return found


def utc_now() -> datetime:
    return datetime.now(UTC)
