"""Every suite adds exactly, hides what it seals, refuses words that nobody sealed, and counts additions."""

import hmac
import struct

import numpy as np
import pytest
import tenseal

from fedsync.cipher.encoding.packing import BITS, SLOTS, Packing
from fedsync.cipher.keys.material import Purpose
from fedsync.cipher.suites import bfv, open_suite, pad, suite
from fedsync.cipher.suites.bfv import Bfv
from fedsync.cipher.suites.pad import Pad, redraw
from fedsync.cipher.suites.suite import (
    BFV,
    BFV_MODULUS,
    BFV_PLAIN,
    FORMS,
    MASKED,
    PAD,
    PAD_MODULUS,
    Adder,
    Member,
    check_words,
)
from fedsync.common.errors import ConfigError, PolicyError, ProtocolError, RunError
from tests.cipher.sealers import KINDS, group, member, sealer

every_kind = pytest.mark.parametrize("kind", KINDS)


def test_moduli_are_the_primes_that_they_are_said_to_be() -> None:
    """The library picks the largest of 60 (q) and 48 bits (t) that are 1 modulo 2 N; that of `pad` is the largest."""

    def is_prime(number: int) -> bool:
        """Miller and Rabin's test, with bases that decide every number below 2^64."""
        twos = (number - 1 & 1 - number).bit_length() - 1
        odd = number - 1 >> twos
        return all(
            pow(base, odd, number) == 1 or any(pow(base, odd << shift, number) == number - 1 for shift in range(twos))
            for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
        )

    assert next(number for number in range(2**64 - 1, 0, -1) if is_prime(number)) == PAD_MODULUS
    step = 2 * SLOTS
    for bits, prime in ((60, BFV_MODULUS), (48, BFV_PLAIN)):
        top = 2**bits - 2**bits % step + 1
        assert next(number for number in range(top - step, 0, -step) if is_prime(number)) == prime


@every_kind
def test_equal_chunks_of_an_update_are_sealed_unequally(kind: str) -> None:
    """Otherwise the difference of two sealed chunks is the difference of the values in them."""
    words = sealer(kind).seal(np.zeros((3, SLOTS), np.int64), member(0))
    assert len(np.unique(words, axis=0)) == 3


@every_kind
@pytest.mark.parametrize("bits", BITS)
def test_the_largest_sums_that_are_allowed_are_exact(kind: str, bits: int) -> None:
    packing = Packing(bits, FORMS[kind].slot_bits)
    limit = FORMS[kind].limit(packing)
    integers = np.full(packing.per_chunk, packing.peak, np.int32)
    integers[::2] *= -1
    slots = packing.pack(integers)
    adder = Adder(FORMS[kind])
    # A few ciphertexts again and again: noise adds up faster than that of fresh ones.
    fresh = [sealer(kind).seal(slots, member(i)) for i in range(limit if kind == "pad" else 4)]
    total = fresh[0].copy()
    for i in range(1, limit):
        adder.add(total, fresh[i % len(fresh)])
    opened = sealer(kind).open(total, [member(i) for i in range(limit)])
    np.testing.assert_array_equal(packing.unpack(opened), integers * limit)


@every_kind
def test_what_is_no_sum_of_this_suite_is_not_opened(kind: str) -> None:
    """Members that are too many, none, or there twice by name or nonce; words of another shape or type."""
    form, own = FORMS[kind], [member(0)]
    words = np.zeros((1, form.words), np.uint64)
    for members, check in (
        ([member(i) for i in range(form.additions + 1)], "additions"),
        ([], "additions"),
        ([*own, Member("silo0/1", 0, bytes(range(16)), bytes(32))], "members"),
        ([*own, Member("silo7/1", 0, bytes(16), bytes(32))], "members"),
    ):
        with pytest.raises(ProtocolError, match=check):
            sealer(kind).open(words, members)
    for shape, dtype in (
        ((1, form.words - 1), np.uint64),
        ((1, form.words + 1), np.uint64),
        ((form.words,), np.uint64),
        ((1, form.words), np.int64),
        ((1, form.words), np.float64),
    ):
        with pytest.raises(ProtocolError, match="chunks"):
            sealer(kind).open(np.zeros(shape, dtype), own)


@every_kind
def test_words_at_the_modulus_reach_neither_sum_nor_library(kind: str) -> None:
    form = FORMS[kind]
    below = np.full((5, form.words), form.modulus - 1, np.uint64)
    check_words(below, form, "silo")
    for place in (0, form.words // 2, form.words - 1):
        at = below.copy()
        at[4, place] += np.uint64(1)
        with pytest.raises(ProtocolError, match="words"):
            check_words(at, form, "silo")
        with pytest.raises(ProtocolError, match="words"):
            sealer(kind).open(at, [member(0)])


@every_kind
def test_adding_is_addition_modulo_the_prime(kind: str) -> None:
    rng, form = np.random.default_rng(1), FORMS[kind]
    first, second = (rng.integers(0, form.modulus, (6, form.words), dtype=np.uint64) for _ in range(2))
    first[0] = second[0] = form.modulus - 1
    # All sums about the modulus, and about 2^64 where words come so high.
    second[1] = np.arange(form.words)
    first[1] = np.uint64(form.modulus - 1) - second[1]
    second[1, ::3] += np.uint64(1)
    second[2, :500] = 2**64 - 250 - first[2, :500] + np.arange(500, dtype=np.uint64)
    second[2] %= np.uint64(form.modulus)
    expected = np.array((first.astype(object) + second.astype(object)) % form.modulus, np.uint64)
    Adder(form).add(first, second)
    np.testing.assert_array_equal(first, expected)
    with pytest.raises(PolicyError):
        Adder(BFV).add(np.zeros((1, BFV.words), np.uint64), np.zeros((2, BFV.words), np.uint64))


@every_kind
def test_sealed_bytes_of_equal_updates_differ_and_look_uniform(kind: str) -> None:
    """Chi-squared of 256 byte values over a chunk, 255 degrees of freedom: 400 is 6.4 deviations off.

    The bytes are those below the highest that a modulus fills, so a uniform word makes uniform bytes.
    """
    slots = np.zeros((1, SLOTS), np.int64)
    one, other = (sealer(kind).seal(slots, member(i)) for i in range(2))
    # Of 8,192 words below 2^40 about none is equal by chance.
    assert np.count_nonzero(one == other) <= 1
    for words in (one, other, one - other):
        low = words.view(np.uint8).reshape(-1, 8)[:, :4].reshape(-1)
        counts = np.bincount(low, minlength=256)
        expected = low.size / 256
        assert ((counts - expected) ** 2 / expected).sum() < 400
        bits = np.unpackbits(low)
        # Each bit is 1 half of the time; neighbouring bits agree half of the time.
        for share in (bits.mean(), (bits[1:] == bits[:-1]).mean()):
            assert abs(share - 0.5) < 6 * 0.5 / np.sqrt(bits.size)


def test_numbers_beyond_the_modulus_are_drawn_again_alike_at_both_ends() -> None:
    for modulus, size in ((BFV_PLAIN, 6), (PAD_MODULUS, 8)):
        numbers = np.full(SLOTS, 5, np.uint64)
        numbers[[3, 70]] = modulus, 256**size - 1
        one, other = numbers.copy(), numbers.copy()
        redraw(one, modulus, b"key", 9)
        redraw(other, modulus, b"key", 9)
        np.testing.assert_array_equal(one, other)
        assert (one < modulus).all()
        assert (np.delete(one, [3, 70]) == 5).all()
        text = b"again" + (9).to_bytes(8, "little") + (3).to_bytes(8, "little") + bytes(8)
        assert one[3] == int.from_bytes(hmac.digest(b"key", text, "sha256")[:size], "little")


def test_keystreams_hold_no_number_beyond_the_modulus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2^58 words of the pad one is: here all are."""
    monkeypatch.setattr(pad.Keystream, "words", lambda _, count: np.full(count, 2**64 - 1, np.uint64))
    for modulus in (BFV_PLAIN, PAD_MODULUS):
        numbers = pad.Numbers(bytes(32), modulus, 0).chunk()
        assert numbers.max() < modulus
        assert len(set(numbers.tolist())) == SLOTS


def test_a_pad_is_added_and_taken_off_modulo_its_prime() -> None:
    """Slots about 0 and at both ends of half the modulus, under keystreams that wrap round once, twice and never."""
    half = PAD_MODULUS // 2
    slots = np.zeros((1, SLOTS), np.int64)
    slots[0, :8] = 0, 1, -1, 60, -60, half, -half, half - 1
    own = Pad(bytes(32))
    words = own.seal(slots, member(0))
    stream = own._stream(member(0), 0).chunk()
    assert words[0].tolist() == [(s + k) % PAD_MODULUS for s, k in zip(slots[0].tolist(), stream.tolist(), strict=True)]
    np.testing.assert_array_equal(own.open(words, [member(0)]), slots)
    numbers = np.random.default_rng(1).integers(0, PAD_MODULUS, (1, SLOTS), dtype=np.uint64)
    numbers[0, :200] = np.arange(200, dtype=np.uint64)
    members = [member(i) for i in range(255)]
    streams = [own._stream(one, 0).chunk().astype(object) for one in members]
    expected = [(n - k) % PAD_MODULUS for n, k in zip(numbers[0].tolist(), sum(streams), strict=True)]
    centred = [number - PAD_MODULUS if number > half else number for number in expected]
    assert own.open(numbers, members)[0].tolist() == centred


def test_pads_and_tags_have_keys_of_their_own() -> None:
    """A tag's key tells what a pad of the same key would be."""
    own = open_suite("pad", group("pad"))
    zeros = np.zeros((1, SLOTS), np.int64)
    pads = [Pad(group("pad").derive(purpose)).seal(zeros, member(0)).tobytes() for purpose in Purpose]
    assert [at for at, one in enumerate(pads) if one == own.seal(zeros, member(0)).tobytes()] == [
        list(Purpose).index(Purpose.PAD)
    ]


def test_a_pad_depends_on_key_nonce_update_round_and_chain() -> None:
    zeros = np.zeros((1, SLOTS), np.int64)
    members = [
        member(0),
        member(0, round_=1),
        Member("silo0/2", 0, bytes(16), member(0).chain),
        Member("silo0/1", 0, b"1" * 16, member(0).chain),
        Member("silo0/1", 0, bytes(16), bytes(32)),
    ]
    words = [Pad(bytes(32)).seal(zeros, one) for one in members] + [Pad(b"k" * 32).seal(zeros, members[0])]
    assert len({one.tobytes() for one in words}) == 6
    np.testing.assert_array_equal(words[0], Pad(bytes(32)).seal(zeros, members[0]))


@pytest.mark.parametrize("context", [b"", b"nonsense", b"\x00" * 5000])
def test_a_damaged_context_is_refused(context: bytes) -> None:
    with pytest.raises(ConfigError, match="group secret"):
        Bfv(context)


def test_a_context_with_other_parameters_is_refused() -> None:
    """One of twice the degree: its ciphertexts have other words."""
    context = tenseal.context(
        *(tenseal.SCHEME_TYPE.BFV, 2 * SLOTS, BFV_PLAIN),
        coeff_mod_bit_sizes=[60, 20],
        encryption_type=tenseal.ENCRYPTION_TYPE.SYMMETRIC,
    )
    with pytest.raises((ConfigError, RunError)):
        Bfv(context.serialize(save_secret_key=True))


@pytest.mark.parametrize(
    ("name", "value"), [("_MAGIC", 0), ("_VECTOR_HEAD", b"\x0b"), ("_FIELDS", struct.Struct("<32sBQQdQQ"))]
)
def test_a_library_that_writes_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: object) -> None:
    """At start-up, before anything is sealed."""
    monkeypatch.setattr(bfv, name, value)
    with pytest.raises(RunError, match="unknown way"):
        Bfv(group("bfv").context)


def test_kinds_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ConfigError, match="bfv, pad, masked"):
        suite.form_of("rot13")
    assert suite.form_of("masked") is MASKED
    assert len({form.code for form in FORMS.values()}) == len(FORMS)
    assert Adder(PAD).form is PAD
