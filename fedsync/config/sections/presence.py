"""When a silo is there: a window of each day, by the clock of its owner's place."""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta
from typing import Annotated, Self
from zoneinfo import ZoneInfo

from pydantic import Field, PrivateAttr, model_validator

from fedsync.config.sections.section import Section
from fedsync.core.silo_presence import Presence

_TIME = r"^([01][0-9]|2[0-3]):[0-5][0-9]$"
_DAYS = (-1, 0, 1, 2)
"""Days whose windows can hold a moment, or begin next, counted from its own; one can be skipped with an hour."""


class PresenceConfig(Section):
    """A window of each day in which a silo takes orders."""

    begin: Annotated[str, Field(pattern=_TIME)]
    """When it begins, such as ``"22:00"`` (in quotes)."""

    until: Annotated[str, Field(pattern=_TIME)]
    """When it ends, on the same day or, if that is earlier, on the next."""

    zone: Annotated[str, Field(min_length=1)]
    """Whose clock counts, such as ``Europe/Berlin``: it says when daylight saving begins and ends."""

    grace_s: Annotated[float, Field(ge=0, le=86_400)] = 300.0
    """How long after the window an order in work may go on [s]; then it is given up."""

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
        """How long the window still lasts [s]; 0 outside of it.

        Args:
            now: the present, with its zone.
        """
        return max((end - now).total_seconds() if begin <= now < end else 0.0 for begin, end in self._windows(now))

    def next_s(self, now: datetime) -> float:
        """How long it is until a window begins [s]; 0 within one."""
        return 0.0 if self.left_s(now) > 0 else self._following_s(now)

    def told(self, now: datetime) -> Presence:
        """What the server hears: durations, and no time of any clock."""
        return Presence(self.left_s(now), self._following_s(now))

    def _following_s(self, now: datetime) -> float:
        """How long it is until the next window begins [s], also within one."""
        return min((begin - now).total_seconds() for begin, end in self._windows(now) if now < begin < end)

    def _windows(self, now: datetime) -> list[tuple[datetime, datetime]]:
        """The windows around a moment, in UTC: only there do differences count hours that a clock skips or repeats."""
        begin, end = time.fromisoformat(self.begin), time.fromisoformat(self.until)
        today = now.astimezone(self._zone).date()
        found = []
        for number in _DAYS:
            first = today + timedelta(days=number)
            last = first + timedelta(days=end < begin)
            # Of a time that the clock shows twice, the window begins at the first and ends at the second; one that it
            # skips is as long after midnight as on other days.
            opens = datetime.combine(first, begin, self._zone).astimezone(UTC)
            closes = max(datetime.combine(last, end.replace(fold=fold), self._zone).astimezone(UTC) for fold in (0, 1))
            found.append((opens, closes))
        return found


def utc_now() -> datetime:
    """The present, in UTC."""
    return datetime.now(UTC)
