"""A message is read only if it is what its receiver expects, byte for byte; everything else has its check."""

import struct
from dataclasses import replace

import numpy as np
import pytest

from fedsync.cipher.encoding import sealed_wire as wire
from fedsync.cipher.encoding.fields import annex_digest
from fedsync.cipher.encoding.packing import Packing
from fedsync.cipher.encoding.sealed_wire import Expected, Kind, Writer, decode, encode
from fedsync.cipher.keys.material import SiloKeys
from fedsync.cipher.suites.suite import FORMS, MASKED, Member
from fedsync.common.errors import ProtocolError
from tests.cipher.messages import GRID, KEYS, TAG, as_read, expected, head, message, unsigned
from tests.cipher.sealers import KINDS, member
from tests.memory import traced

HEAD = head()
MESSAGE = message(HEAD)
EXPECTED = expected(HEAD)
AT = {"magic": 0, "version": 4, "kind": 6, "suite": 7, "bits": 8, "lanes": 9, "members": 10, "header": 12}
AT |= {"annex": 16, "chunks": 20, "epoch": 24, "attempt": 28, "round": 32, "fingerprint": 40, "grid": 56, "sender": 88}
SIZE = 160
"""Bytes of the header."""


def patched(at: int, data: bytes, of: bytes = MESSAGE) -> bytes:
    return of[:at] + data + of[at + len(data) :]


def annexed(annex: bytes) -> Member:
    return replace(member(0, round_=7), annex=annex_digest(annex))


def check_of(data: bytes, of: Expected = EXPECTED) -> str:
    with pytest.raises(ProtocolError) as caught:
        decode(data, of)
    assert caught.value.sender == of.sender
    return caught.value.check


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", Kind)
def test_a_message_is_read_as_it_was_written(kind: str, what: Kind) -> None:
    members = tuple(member(i, round_=i) for i in range(3)) if what is Kind.AGGREGATE else None
    of = head(kind, 3, members, what)
    data = message(of)
    assert len(data) == of.nbytes
    read = decode(data, expected(of))
    assert (read.head, read.tag) == (as_read(of), TAG)
    np.testing.assert_array_equal(read.words, np.random.default_rng(1).integers(0, 2**30, (3, of.form.words)))
    assert encode(read.head, read.words, read.tag, KEYS.signing) == data


def test_the_format_by_hand() -> None:
    fixed = b"FSYM" + struct.pack("<HBBBBHIIIIIQ", 4, 1, 3, 16, 3, 1, 160, 0, 2, 5, 3, 7) + bytes(range(16)) + GRID
    own = b"\x07silo0/1" + struct.pack("<Q", 7) + bytes(16) + member(0).chain
    rest = b"\x05silo0" + own
    header = fixed + rest + bytes(160 - len(fixed + rest))
    assert MESSAGE[:160] == header
    assert len(MESSAGE) == 160 + 2 * 32_768 + 16 + 64
    assert MESSAGE[-80:-64] == struct.pack("<2Q", *TAG)


def test_the_words_are_a_view_of_the_message() -> None:
    of = head("pad", 64)
    data = message(of)
    with traced() as taken:
        decode(data, expected(of))
    assert taken.peak < 2**18 < len(data) / 8


@pytest.mark.parametrize(
    ("place", "data", "check"),
    [
        ("magic", b"FSYN", "magic"),
        ("version", b"\x01\x00", "version"),
        ("kind", b"\x02", "kind"),
        ("kind", b"\xff", "kind"),
        ("suite", b"\x01", "suite"),
        ("suite", b"\x63", "suite"),
        ("bits", b"\x08", "bits"),
        ("lanes", b"\x02", "lanes"),
        ("chunks", struct.pack("<I", 1), "chunks"),
        ("chunks", struct.pack("<I", 2**32 - 1), "chunks"),
        ("members", b"\x00\x00", "members"),
        ("members", b"\xff\xff", "members"),
        ("members", b"\x02\x00", "header"),
        ("header", struct.pack("<I", 2**32 - 8), "header"),
        ("header", struct.pack("<I", 8), "header"),
        ("header", struct.pack("<I", 161), "header"),
        ("header", struct.pack("<I", 168), "length"),
        ("header", struct.pack("<I", 152), "length"),
        ("annex", struct.pack("<I", 1), "annex"),
        ("annex", struct.pack("<I", 2**32 - 1), "annex"),
        ("epoch", struct.pack("<I", 4), "key epoch"),
        ("attempt", struct.pack("<I", 2), "attempt"),
        ("round", struct.pack("<Q", 6), "round"),
        ("round", struct.pack("<Q", 2**64 - 1), "round"),
        ("fingerprint", bytes(16), "key fingerprint"),
        ("grid", bytes(32), "grid"),
        ("sender", b"\x05silo1", "sender"),
        ("sender", b"\x00", "header"),
        ("sender", b"\xff", "header"),
        ("sender", b"\x05\xff\xfe\xfd\xfc\xfb", "header"),
    ],
)
def test_a_field_that_is_not_as_expected_is_refused(place: str, data: bytes, check: str) -> None:
    """Without looking at the signature: a sender with a key is no less hostile."""
    assert check_of(patched(AT[place], data), unsigned(EXPECTED)) == check


@pytest.mark.parametrize("size", [0, 1, 87, 88, 159, 160, 200, len(MESSAGE) // 2, len(MESSAGE) - 1])
def test_a_message_that_was_cut_is_refused(size: int) -> None:
    assert check_of(MESSAGE[:size]) in {"length", "header"}


@pytest.mark.parametrize("more", [b"\x00", bytes(8), bytes(32_768), MESSAGE])
def test_a_message_that_goes_on_is_refused(more: bytes) -> None:
    """Two messages joined are none."""
    assert check_of(MESSAGE + more) == "length"


MASKED_HEAD = replace(head("masked", members=(annexed(b"shares!"),)), annex=b"shares!")


def test_a_masked_update_has_an_annex_and_its_member_the_digest() -> None:
    data = message(MASKED_HEAD)
    assert data[SIZE : SIZE + 8] == b"shares!\0"
    assert len(data) == MASKED_HEAD.nbytes == SIZE + 8 + 2 * 65_536 + 80
    read = decode(data, expected(MASKED_HEAD)).head
    assert read == as_read(MASKED_HEAD)
    assert read.annex == b"shares!"
    assert read.members[0].annex == annex_digest(b"shares!")
    assert decode(message(head("masked")), expected(head("masked"))).head.members[0].annex == bytes(32)


@pytest.mark.parametrize(
    ("at", "data", "check"),
    [
        (AT["annex"], struct.pack("<I", 8), "signature"),
        (AT["annex"], struct.pack("<I", 6), "annex"),
        (AT["annex"], struct.pack("<I", 0), "length"),
        (AT["annex"], struct.pack("<I", 9), "length"),
        (AT["annex"], struct.pack("<I", wire.MAX_ANNEX + 1), "annex"),
        (SIZE, b"S", "signature"),
        (SIZE + 7, b"\1", "annex"),
    ],
)
def test_another_annex_is_refused(at: int, data: bytes, check: str) -> None:
    assert check_of(patched(at, data, message(MASKED_HEAD)), expected(MASKED_HEAD)) == check


def test_a_sum_has_no_annex_and_lists_those_of_its_members() -> None:
    members = (annexed(b"one"), replace(member(1), digest=bytes(range(32))))
    of = head("masked", members=members, what=Kind.AGGREGATE)
    assert decode(message(of), expected(of)).head.members == members
    size = of.nbytes - 2 * 65_536 - 80
    longer = patched(AT["annex"], struct.pack("<I", 8), message(of)[:size] + bytes(8) + message(of)[size:])
    assert check_of(longer, expected(of)) == "annex"


def test_it_may_not_claim_chunks_that_it_does_not_carry() -> None:
    """A claim that crashed a server which trusted it: the length must fit before anything is read or made."""
    of = replace(EXPECTED, chunks=2**20)
    with traced() as taken:
        assert check_of(patched(AT["chunks"], struct.pack("<I", 2**20)), of) == "length"
    assert taken.peak < 2**18


def test_filling_is_zero_and_short() -> None:
    end = AT["sender"] + 6 + 8 + 56  # sender, update id, round, nonce and chain
    assert check_of(patched(end, b"\x01"), unsigned(EXPECTED)) == "header"
    longer = patched(AT["header"], struct.pack("<I", 168), MESSAGE[:160] + bytes(8) + MESSAGE[160:])
    assert check_of(longer, unsigned(EXPECTED)) == "header"


def test_an_update_has_one_member_itself() -> None:
    for members, check in (
        ((member(0, round_=7), member(1, round_=7)), "members"),
        ((member(0, round_=6),), "round"),
        ((member(1, round_=7),), "update id"),
    ):
        of = head(members=members)
        assert check_of(message(of), replace(expected(of), update_id="silo0/1")) == check


def test_an_aggregate_holds_no_update_twice_and_no_more_than_can_be_added() -> None:
    limit = Packing(16, 64).additions
    for members, check in (
        ((member(0), Member("silo0/1", 1, bytes(range(16)), bytes(32))), "members"),
        ((member(0), Member("silo9/1", 0, bytes(16), bytes(32))), "members"),
        (tuple(member(i) for i in range(limit + 1)), "additions"),
    ):
        of = head(members=members, what=Kind.AGGREGATE)
        assert check_of(message(of), expected(of)) == check
    of = head(members=tuple(member(i) for i in range(limit)), what=Kind.AGGREGATE)
    decode(message(of), expected(of))


def test_another_silos_signature_is_refused() -> None:
    other = SiloKeys.generate("silo0")
    words = decode(MESSAGE, EXPECTED).words
    assert check_of(encode(HEAD, words, TAG, other.signing)) == "signature"
    assert check_of(encode(HEAD, words, TAG, None)) == "signature"
    decode(encode(HEAD, words, TAG, None), unsigned(EXPECTED))


@pytest.mark.parametrize("kind", KINDS)
def test_words_and_tags_at_the_modulus_are_refused(kind: str) -> None:
    of = head(kind)
    modulus, words = of.form.modulus, decode(message(of), expected(of)).words.copy()
    for tag in ((1, modulus), (modulus, 1)):
        assert check_of(encode(of, words, tag, KEYS.signing), expected(of)) == "tag"
    for word in (modulus, 2**64 - 1):
        words[1, -1] = word
        assert check_of(encode(of, words, TAG, KEYS.signing), expected(of)) == "words"


@pytest.mark.parametrize(
    "change",
    [
        {"members": ()},
        {"members": tuple(member(i) for i in range(256))},
        {"chunks": 0},
        {"chunks": wire.MAX_CHUNKS + 1},
        {"sender": ""},
        {"sender": "x" * 256},
        {"epoch": 2**32},
        {"round": -1},
        {"grid": bytes(31)},
        {"fingerprint": bytes(17)},
        {"annex": b"annex of a suite without masks"},
        {"form": MASKED, "annex": b"annex of which the member knows nothing"},
        {"form": MASKED, "annex": bytes(wire.MAX_ANNEX + 1), "members": (annexed(bytes(wire.MAX_ANNEX + 1)),)},
        {"form": MASKED, "annex": b"a", "members": (annexed(b"a"),), "kind": Kind.AGGREGATE},
    ],
)
def test_what_cannot_be_read_is_not_written(change: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        Writer(replace(HEAD, **change), None)  # type: ignore[arg-type]  # one change at a time


def test_a_writer_counts_its_chunks() -> None:
    words = np.zeros((1, FORMS["pad"].words), np.uint64)
    writer = Writer(HEAD, None)
    writer.payload(words)
    with pytest.raises(ValueError, match="1 chunks are missing"):
        writer.trailer(TAG)
    with pytest.raises(ValueError, match="do not fit"):
        writer.payload(np.zeros((1, 8), np.uint64))
    writer.payload(words)
    with pytest.raises(ValueError, match="do not fit"):
        writer.payload(words)
