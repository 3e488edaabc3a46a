"""Silos of one round are sent one roster, whoever comes and goes meanwhile."""

import pytest

from fedsync.cipher.encoding.fields import unpack_named
from fedsync.cipher.masking.unmask import Announcements
from fedsync.cipher.suites.suite import MASKED
from fedsync.common.errors import ProtocolError

RUN = bytes(32)
ONE, TWO = (RUN + bytes([number] * 96) for number in (1, 2))


def names(announcements: Announcements, silo: str) -> str:
    return "".join(unpack_named(announcements.roster(silo), "server"))


def test_a_roster_lasts_as_long_as_its_version() -> None:
    announcements = Announcements()
    for silo in "abc":
        announcements.put(silo, ONE)
    assert names(announcements, "a") == "abc"
    announcements.put("d", ONE)
    del announcements.here["c"]
    assert names(announcements, "b") == "abc", "a version's first roster"
    assert names(announcements, "d") == "abd", "who comes later is in its own"
    announcements.renew()
    assert {names(announcements, silo) for silo in "abd"} == {"abd"}


def test_who_announces_another_key_is_sent_that() -> None:
    announcements = Announcements()
    for silo in "abc":
        announcements.put(silo, ONE)
    old = announcements.roster("a")
    announcements.put("b", TWO)
    assert announcements.roster("a") == old
    assert unpack_named(announcements.roster("b"), "server")["b"] == TWO


def test_one_silo_that_announces_another_run_keeps_nobody_out() -> None:
    announcements = Announcements()
    for silo in "abcd":
        announcements.put(silo, bytes([silo == "a"] * 32) + bytes(96))
    assert names(announcements, "b") == "bcd"
    assert Announcements().roster("a") == b""


def test_no_more_silos_are_in_a_roster_than_what_opens_their_sum_has_room_for() -> None:
    announcements = Announcements()
    for number in range(MASKED.additions):
        announcements.put(f"{number}", ONE)
    with pytest.raises(ProtocolError, match=r"'late' failed the check 'announcement'.*when one of them leaves"):
        announcements.put("late", ONE)
    announcements.put("0", TWO)
    assert "late" not in unpack_named(announcements.roster("0"), "server")
    del announcements.here["1"]
    announcements.put("late", ONE)
    assert "late" in announcements.here and len(announcements.here) == MASKED.additions
