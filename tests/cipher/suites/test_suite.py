"""Every suite adds exactly, hides what it seals, refuses words that nobody sealed, and counts additions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsync.cipher.encoding.packing import BITS, SLOTS, Packing
from fedsync.cipher.suites import bfv, ckks, suite
from fedsync.cipher.suites.bfv import Bfv
from fedsync.cipher.suites.pad import Pad
from fedsync.cipher.suites.suite import (
    BFV,
    BFV_MODULUS,
    BFV_PLAIN,
    CKKS,
    CKKS_MODULI,
    FORMS,
    MASKED,
    PAD,
    Adder,
    Member,
)
from fedsync.core.errors import ConfigError, PolicyError, ProtocolError, RunError
from tests.cipher.sealers import KINDS, group, member, sealer, slots_of, summed

every_kind = pytest.mark.parametrize("kind", KINDS)


def test_moduli_are_the_primes_that_the_library_picks() -> None:
    assert suite.largest_prime(60, 2 * SLOTS) == BFV_MODULUS
    assert suite.largest_prime(48, 2 * SLOTS) == BFV_PLAIN
    assert CKKS_MODULI[0] == suite.largest_prime(60, 16384)
    largest = suite.largest_prime(40, 16384)
    between = [n for n in range(CKKS_MODULI[1], largest, 16384) if pow(2, n - 1, n) == 1]
    assert between == [CKKS_MODULI[1]], "the second largest"


@pytest.mark.parametrize(("kind", "bytes_"), [("bfv", 65_536), ("masked", 65_536), ("ckks", 262_144), ("pad", 32_768)])
def test_bytes_of_a_chunk(kind: str, bytes_: int) -> None:
    assert FORMS[kind].chunk_bytes == bytes_


@every_kind
@settings(max_examples=4, deadline=None)
@given(st.data())
def test_sums_are_exact_whoever_drops_out(kind: str, data: st.DataObject) -> None:
    bits = FORMS[kind].slot_bits
    count = data.draw(st.integers(1, 4))
    seed = data.draw(st.integers(0, 2**32))
    # Two bits less, so that four can be added.
    slots = [slots_of(2, bits - 2, seed + i) for i in range(count)]
    words = [sealer(kind).seal(one, member(i)) for i, one in enumerate(slots)]
    left = sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1)))
    total = summed(kind, [words[i] for i in left])
    opened = sealer(kind).open(total, [member(i) for i in left])
    np.testing.assert_array_equal(opened, sum(slots[i] for i in left))


@every_kind
@pytest.mark.parametrize("bits", BITS)
def test_the_largest_sums_that_are_allowed_are_exact(kind: str, bits: int) -> None:
    lanes = Packing(bits, FORMS[kind].slot_bits)
    limit = suite.smallest_limit(FORMS[kind], lanes.additions)
    integers = np.full(lanes.per_chunk, lanes.peak, np.int32)
    integers[::2] *= -1
    slots = lanes.pack(integers)
    adder = Adder(FORMS[kind])
    # A few ciphertexts again and again: noise adds up faster than that of fresh ones.
    fresh = [sealer(kind).seal(slots, member(i)) for i in range(limit if kind == "pad" else 4)]
    total = fresh[0].copy()
    for i in range(1, limit):
        adder.add(total, fresh[i % len(fresh)])
    opened = sealer(kind).open(total, [member(i) for i in range(limit)])
    np.testing.assert_array_equal(lanes.unpack(opened), integers * limit)


@every_kind
def test_chunks_can_be_sealed_and_opened_in_portions(kind: str) -> None:
    slots = slots_of(3, FORMS[kind].slot_bits - 1)
    words = np.concatenate([sealer(kind).seal(slots[:1], member(0)), sealer(kind).seal(slots[1:], member(0), 1)])
    assert words.shape == (3, FORMS[kind].words)
    np.testing.assert_array_equal(sealer(kind).open(words, [member(0)]), slots)
    np.testing.assert_array_equal(sealer(kind).open(words[2:], [member(0)], 2), slots[2:])


@every_kind
def test_an_addition_too_many_is_an_error(kind: str) -> None:
    words = np.zeros((1, FORMS[kind].words), np.uint64)
    too_many = [member(i) for i in range(FORMS[kind].additions + 1)]
    with pytest.raises(ProtocolError, match="additions"):
        sealer(kind).open(words, too_many)
    with pytest.raises(ProtocolError, match="additions"):
        sealer(kind).open(words, [])


@every_kind
def test_one_update_or_nonce_twice_in_a_sum_is_an_error(kind: str) -> None:
    words = np.zeros((1, FORMS[kind].words), np.uint64)
    for twice in (Member("silo0/1", 0, bytes(range(16))), Member("silo7/1", 0, bytes(16))):
        with pytest.raises(ProtocolError, match="members"):
            sealer(kind).open(words, [member(0), twice])


@pytest.mark.parametrize("kind", ["bfv", "masked", "ckks"])
def test_words_at_the_modulus_reach_neither_sum_nor_library(kind: str) -> None:
    form = FORMS[kind]
    limits = np.resize(np.repeat(np.array(form.moduli, np.uint64), form.stretch), form.words)
    below = np.tile(limits - np.uint64(1), (5, 1))
    Adder(form).check(below, "silo")
    for place in (0, form.stretch - 1, form.stretch % form.words, form.words - 1):
        at = below.copy()
        at[4, place] += np.uint64(1)
        with pytest.raises(ProtocolError, match="words"):
            Adder(form).check(at, "silo")
        with pytest.raises(ProtocolError, match="words"):
            sealer(kind).open(at, [member(0)])


@every_kind
def test_chunks_of_another_shape_or_type_are_refused(kind: str) -> None:
    words = FORMS[kind].words
    for wrong in (
        np.zeros((1, words - 1), np.uint64),
        np.zeros((1, words + 1), np.uint64),
        np.zeros(words, np.uint64),
        np.zeros((1, words), np.int64),
        np.zeros((1, words), np.float64),
    ):
        with pytest.raises(ProtocolError, match="chunks"):
            sealer(kind).open(wrong, [member(0)])


def test_adding_is_addition_modulo_every_prime() -> None:
    for form in (BFV, CKKS):
        limits = np.resize(np.repeat(np.array(form.moduli, np.uint64), form.stretch), form.words)
        rng = np.random.default_rng(1)
        first, second = (rng.integers(0, limits, (6, form.words), dtype=np.uint64) for _ in range(2))
        first[0], second[0] = limits - np.uint64(1), limits - np.uint64(1)
        expected = np.array((first[:2].astype(object) + second[:2].astype(object)) % limits.astype(object), np.uint64)
        total = first.copy()
        Adder(form).add(total, second)
        np.testing.assert_array_equal(total[:2], expected)
        assert (total < limits).all()
    with pytest.raises(PolicyError):
        Adder(BFV).add(np.zeros((1, BFV.words), np.uint64), np.zeros((2, BFV.words), np.uint64))


def test_the_server_adds_bit_for_bit_what_the_library_adds() -> None:
    own = sealer("bfv")
    assert isinstance(own, Bfv)
    words = [own.seal(slots_of(1, 40, seed), member(seed)) for seed in range(2)]
    vectors = [bfv._VECTOR(own._context, own._head + one.tobytes()) for one in words]
    body = b"".join(bfv.unpacked(bfv.seal_bytes((vectors[0] + vectors[1]).serialize(), SLOTS)))
    assert body[bfv.PREFIX_BYTES :] == summed("bfv", words).tobytes()


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


@every_kind
def test_what_is_sealed_is_not_in_the_words(kind: str) -> None:
    """The correlation of slots with the words' high bits is that of independent numbers: below 6 / sqrt(n)."""
    slots = slots_of(1, FORMS[kind].slot_bits - 1)
    words = sealer(kind).seal(slots, member(0))
    moduli = np.resize(
        np.repeat(np.array([m or 2**64 for m in FORMS[kind].moduli], float), FORMS[kind].stretch), words.size
    )
    for part in np.split(words.reshape(-1) / moduli, words.size // SLOTS):
        assert abs(np.corrcoef(slots[0], part)[0, 1]) < 6 / np.sqrt(SLOTS)


@pytest.mark.parametrize("kind", ["bfv", "ckks", "pad"])
def test_another_groups_key_opens_nothing(kind: str) -> None:
    slots = slots_of(1, FORMS[kind].slot_bits - 1)
    words = sealer(kind).seal(slots, member(0))
    other = {
        "bfv": lambda: Bfv(bfv.new_context()),
        "ckks": lambda: ckks.Ckks(ckks.new_context()),
        "pad": lambda: Pad(bytes(32)),
    }
    try:
        opened = other[kind]().open(words, [member(0)])
    except ProtocolError as error:
        assert error.check == "range"
    else:
        assert np.count_nonzero(opened == slots) <= 1


def test_a_pad_depends_on_key_nonce_update_and_round() -> None:
    zeros = np.zeros((1, SLOTS), np.int64)
    members = [member(0), member(0, round_=1), Member("silo0/2", 0, bytes(16)), Member("silo0/1", 0, b"1" * 16)]
    words = [Pad(bytes(32)).seal(zeros, one) for one in members] + [Pad(b"k" * 32).seal(zeros, members[0])]
    assert len({one.tobytes() for one in words}) == 5
    np.testing.assert_array_equal(words[0], Pad(bytes(32)).seal(zeros, members[0]))


@pytest.mark.parametrize("context", [b"", b"nonsense", b"\x00" * 5000])
@pytest.mark.parametrize("make", [Bfv, ckks.Ckks])
def test_a_damaged_context_is_refused(make: type[Bfv], context: bytes) -> None:
    with pytest.raises(ConfigError, match="group secret"):
        make(context)


def test_a_context_of_another_suite_is_refused() -> None:
    with pytest.raises((ConfigError, RunError)):
        Bfv(group("ckks").context)
    with pytest.raises((ConfigError, RunError)):
        ckks.Ckks(group("bfv").context)


def test_a_library_that_writes_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """At start-up, before anything is sealed: here a ciphertext with one polynomial more is expected."""
    monkeypatch.setattr(bfv, "_SHAPE", bfv.CiphertextShape(degree=SLOTS, primes=2, ntt=False, scale=1.0, slots=SLOTS))
    with pytest.raises(RunError, match="unknown way"):
        Bfv(group("bfv").context)


def test_kinds_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ConfigError, match="bfv, ckks, pad, masked"):
        suite.form_of("rot13")
    assert suite.form_of("masked") is MASKED
    assert len({form.code for form in FORMS.values()}) == len(FORMS)
    assert Adder(PAD).form is PAD
