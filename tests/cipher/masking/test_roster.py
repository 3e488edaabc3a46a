"""The server may send any roster; it cannot write an announcement, nor use one of another run."""

import hashlib
import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsync.cipher.encoding.fields import MAX_BYTES, pack_frames, pack_named, unpack_frames, unpack_named
from fedsync.cipher.keys.material import SiloKeys
from fedsync.cipher.masking.mask_roster import MaskRoster, announce, announced, fresh_pair, least_survivors, threshold
from fedsync.cipher.masking.mask_round import MaskRound
from fedsync.common.errors import ProtocolError
from tests.cipher.masking.rounds import (
    CONTEXT,
    LONG,
    MEMBERS,
    NAMES,
    PAIRS,
    RUN,
    WORK,
    announcements,
    roster,
    rounds,
    survivors_of,
)


def read(named: dict[str, bytes]) -> MaskRoster:
    return MaskRoster.read(pack_named(named), MEMBERS, RUN, 1)


@given(colluding=st.integers(0, 30), more=st.integers(0, 60))
def test_no_two_lists_get_enough_signatures_and_there_can_be_one(colluding: int, more: int) -> None:
    """Honest silos sign one list, the others both."""
    silos = least_survivors(colluding) + more
    t = threshold(silos, colluding)
    honest = silos - colluding
    assert 2 * t > honest + 2 * colluding
    assert colluding < t <= silos
    assert 2 * (t - 1) <= silos + colluding, "no larger than it must be"


def test_a_roster_has_the_keys_that_silos_announced() -> None:
    found = roster()
    assert {name: keys.exchange for name, keys in found.keys.items()} == {n: PAIRS[n].public.exchange for n in NAMES}
    assert all(found.keys[name].exchange != MEMBERS[name].exchange for name in NAMES)
    assert found.threshold == 4
    assert found.digest == hashlib.sha256(pack_named(announcements())).digest()


def test_an_announcement_of_another_run_another_silo_or_the_server_s_making_is_refused() -> None:
    good = announcements()
    other_run = announce(PAIRS["silo1"], hashlib.sha256(b"another run").digest())
    own_key = announce(fresh_pair(replace(LONG["silo1"], signing=bytes(range(32)))), RUN)
    renamed = RUN + other_run[32:]
    for bad in (renamed, good["silo2"], own_key, good["silo1"][:64] + bytes(64), bytes(128)):
        with pytest.raises(ProtocolError, match="not signed by its silo"):
            read({**good, "silo1": bad})
    with pytest.raises(ProtocolError, match="for another run"):
        read({**good, "silo1": other_run})
    with pytest.raises(ProtocolError):
        read({**good, "silo1": good["silo1"][:-1]})


def test_a_stranger_is_refused() -> None:
    stranger = SiloKeys.generate("stranger")
    with pytest.raises(ProtocolError, match="1 silos that have no key"):
        read({**announcements(), "stranger": announce(stranger, RUN)})


@pytest.mark.parametrize(("silos", "colluding"), [(2, 1), (3, 2), (1, 0)])
def test_in_a_roster_of_too_few_silos_no_list_is_signed(silos: int, colluding: int) -> None:
    names = NAMES[:silos]
    of = rounds(names, colluding=colluding)
    with pytest.raises(ProtocolError, match="would disclose too much"):
        of[names[0]].sign(survivors_of(of, names))


def test_a_key_with_which_no_secret_can_be_agreed_on_is_refused() -> None:
    text = RUN + bytes(32)
    signature = LONG["silo1"].sign(b"mask announcement 1", text)
    with pytest.raises(ProtocolError, match="no shared secret"):
        announced(text + signature, MEMBERS["silo1"].signing, "silo1")


def test_who_is_not_in_the_roster_with_its_own_key_takes_no_part() -> None:
    MaskRound(PAIRS["silo0"], roster(), CONTEXT, *WORK)
    for own in (fresh_pair(LONG["silo0"]), LONG["silo0"]):
        with pytest.raises(ProtocolError, match="not in it with the key that it announced"):
            MaskRound(own, roster(), CONTEXT, *WORK)
    with pytest.raises(ProtocolError, match="not in it"):
        MaskRound(PAIRS["silo0"], roster(NAMES[1:]), CONTEXT, *WORK)


# Frames.


@pytest.mark.slow
@given(st.dictionaries(st.text(max_size=5), st.binary(max_size=5), max_size=5))
def test_named_frames_come_back_and_have_one_encoding(values: dict[str, bytes]) -> None:
    ordered = dict(sorted(values.items()))
    assert unpack_named(pack_named(values), "a") == ordered
    for other in itertools.islice(itertools.permutations(ordered.items()), 1, 5):
        data = pack_frames(part for name, value in other for part in (name.encode(), value))
        with pytest.raises(ProtocolError, match="not in order"):
            unpack_named(data, "a")


@given(st.binary(max_size=40))
def test_other_bytes_are_refused_or_frames(data: bytes) -> None:
    for read_them in (unpack_frames, unpack_named):
        try:
            read_them(data, "a")
        except ProtocolError as error:
            assert error.sender == "a"


def test_what_is_no_frames() -> None:
    for data in (b"\x01\0\0", b"\x02\0\0\0a", pack_frames([b"a"]) + b"\0"):
        with pytest.raises(ProtocolError, match="end within a frame"):
            unpack_frames(data, "a")
    with pytest.raises(ProtocolError, match="2 frames, not 3"):
        unpack_frames(pack_frames([b"a", b"b"]), "a", 3)
    with pytest.raises(ProtocolError, match="no text"):
        unpack_named(pack_frames([b"\xff", b""]), "a")
    with pytest.raises(ProtocolError, match="has not 2 bytes"):
        unpack_named(pack_frames([b"a", b"b"]), "a", 2)
    with pytest.raises(ProtocolError, match="at most"):
        unpack_frames(bytes(MAX_BYTES + 1), "a")
