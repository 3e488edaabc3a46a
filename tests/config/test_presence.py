"""Windows of a silo's day, by fixed clocks: over midnight, and where the clock is put forward or back."""

from datetime import UTC, datetime, timedelta

import pytest

from fedsync.config.sections.presence import PresenceConfig

HOUR = 3600.0


def window(begin: str = "22:00", until: str = "06:00", zone: str = "Europe/Berlin") -> PresenceConfig:
    return PresenceConfig(begin=begin, until=until, zone=zone)


def at(text: str) -> datetime:
    """A moment in UTC."""
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@pytest.mark.parametrize(
    ("now", "left_h", "next_h"),
    # In winter Berlin is an hour ahead of UTC, in summer two.
    [
        ("2026-01-10 20:59", 0.0, 1 / 60),
        ("2026-01-10 21:00", 8.0, 0.0),
        ("2026-01-11 00:00", 5.0, 0.0),
        ("2026-01-11 04:59", 1 / 60, 0.0),
        ("2026-01-11 05:00", 0.0, 16.0),
        ("2026-07-10 20:00", 8.0, 0.0),
        ("2026-07-10 19:00", 0.0, 1.0),
        # The night of 2026-03-29 has an hour less: 22:00 at +1 is 21:00 UTC, 06:00 at +2 is 04:00 UTC.
        ("2026-03-28 21:00", 7.0, 0.0),
        ("2026-03-28 20:00", 0.0, 1.0),
        ("2026-03-29 03:59", 1 / 60, 0.0),
        ("2026-03-29 04:00", 0.0, 16.0),
        # The night of 2026-10-25 has an hour more: 20:00 UTC to 05:00 UTC.
        ("2026-10-24 20:00", 9.0, 0.0),
        ("2026-10-25 04:30", 0.5, 0.0),
        ("2026-10-25 05:00", 0.0, 16.0),
    ],
)
def test_over_midnight_and_where_clocks_change(now: str, left_h: float, next_h: float) -> None:
    assert window().left_s(at(now)) == pytest.approx(left_h * HOUR)
    assert window().next_s(at(now)) == pytest.approx(next_h * HOUR)


def test_a_time_that_the_clock_shows_twice_or_never() -> None:
    """02:30 of 2026-10-25 is at 00:30 and at 01:30 UTC; 02:30 of 2026-03-29 is skipped, 150 minutes after midnight."""
    assert window("02:30", "04:00").left_s(at("2026-10-25 00:30")) == pytest.approx(2.5 * HOUR)
    assert window("01:00", "02:30").left_s(at("2026-10-25 00:00")) == pytest.approx(1.5 * HOUR)
    assert window("02:30", "05:00").next_s(at("2026-03-29 01:00")) == pytest.approx(0.5 * HOUR)
    assert window("01:00", "02:30").left_s(at("2026-03-29 00:00")) == pytest.approx(1.5 * HOUR)
    # 02:30 is at 03:30 by the clock of that day, which is after 03:00: that day has no window.
    skipped = window("02:30", "03:00")
    assert skipped.left_s(at("2026-03-29 00:59")) == skipped.left_s(at("2026-03-29 01:15")) == 0.0
    assert skipped.next_s(at("2026-03-29 00:00")) == pytest.approx(24.5 * HOUR)


ZONES = ["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "UTC", "Asia/Kathmandu"]
TIMES = [("22:00", "06:00"), ("00:00", "23:59"), ("01:30", "02:15"), ("23:59", "00:00")]


@pytest.mark.parametrize(
    ("zone", "times"),
    [
        # Each zone and each window once; all of them with `make full`.
        pytest.param(zone, times, marks=[pytest.mark.full] * (zone != ZONES[0] and times != TIMES[0]))
        for zone in ZONES
        for times in TIMES
    ],
)
def test_at_each_quarter_of_a_year_it_is_there_or_will_be(zone: str, times: tuple[str, str]) -> None:
    told = window(*times, zone)
    now = at("2026-01-01 00:07")
    for _ in range(0, 366 * 24, 5):
        now += timedelta(hours=5)
        left_s, next_s = told.left_s(now), told.next_s(now)
        assert (left_s > 0) != (next_s > 0)
        if left_s:
            assert told.left_s(now + timedelta(seconds=left_s)) == 0, "ends then"
        else:
            assert told.left_s(now + timedelta(seconds=next_s)) > 0, "begins then, and not a second before"
            assert told.left_s(now + timedelta(seconds=next_s - 1)) == 0


def test_what_is_no_window_is_refused() -> None:
    for wrong in ({"begin": "25:00"}, {"until": "6:00"}, {"until": "22:00"}, {"zone": "Mars/Base"}, {"zone": "../x"}):
        with pytest.raises(ValueError):
            window(**wrong)
