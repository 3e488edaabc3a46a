"""A tag fits the sum of exactly those updates that are named, and nothing is opened before it was found to fit."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsync.cipher.encoding.integrity import Authenticator, added
from fedsync.cipher.encoding.packing import Packing
from fedsync.cipher.encoding.sealed_wire import NO_TAG, Envelope, Kind, Tag, member_context
from fedsync.cipher.suites.pad import Keystream
from fedsync.cipher.suites.suite import FORMS, Form, Member, Words
from fedsync.common.errors import PolicyError, ProtocolError
from fedsync.model.chunked_arrays import SPAN_BYTES, map_file
from tests.cipher.messages import head
from tests.cipher.sealers import KINDS, member, summed

KEY = bytes(range(32))
every_kind = pytest.mark.parametrize("kind", KINDS)


@cache
def authenticator(kind: str) -> Authenticator:
    return Authenticator(KEY, FORMS[kind])


def words_of(kind: str, chunks: int, seed: int = 0) -> Words:
    form = FORMS[kind]
    return np.random.default_rng(seed).integers(0, form.modulus, (chunks, form.words), dtype=np.uint64)


def hash_of(kind: str, words: Words) -> Tag:
    hasher = authenticator(kind).hasher()
    hasher.take(words)
    return hasher.value()


def update(kind: str, index: int, words: Words, **changes: object) -> Envelope:
    """Update number ``index`` as it reaches the server."""
    digest = hashlib.sha256(words.tobytes()).digest()
    own = replace(member(index), digest=digest, **changes)  # type: ignore[arg-type]  # one change at a time
    of = head(kind, len(words), (own,))
    return Envelope(of, words, authenticator(kind).tag(hash_of(kind, words), of))


def sum_of(kind: str, updates: Sequence[Envelope]) -> Envelope:
    """What an honest server makes of them."""
    members, tag = tuple(one.head.members[0] for one in updates), NO_TAG
    for one in updates:
        tag = added(tag, one.tag, FORMS[kind])
    of = head(kind, len(updates[0].words), members, Kind.AGGREGATE)
    return Envelope(of, summed(kind, [one.words for one in updates]), tag)


def fits(envelope: Envelope) -> bool:
    try:
        authenticator(envelope.head.form.kind).authenticate(envelope, "server")
    except ProtocolError as error:
        assert (error.sender, error.check) == ("server", "tag")
        return False
    return True


@cache
def three(kind: str) -> Envelope:
    """The sum of three updates of three chunks."""
    return sum_of(kind, [update(kind, index, words_of(kind, 3, index)) for index in range(3)])


def with_words(envelope: Envelope, words: Words) -> Envelope:
    return replace(envelope, words=words % np.uint64(envelope.head.form.modulus))


def with_members(envelope: Envelope, *members: Member) -> Envelope:
    return replace(envelope, head=replace(envelope.head, members=members))


# The hash is what it is said to be.


def coefficients(kind: str, chunks: int) -> tuple[list[list[int]], list[list[int]]]:
    """rho [check][position] and s [check][block] as plain integers, from the key by hand."""
    form = FORMS[kind]
    key = hmac.digest(KEY, b"fedsync tag 2\0" + bytes([form.code]), "sha256")
    rho = []
    for check in (b"\0", b"\1"):
        drawn = Keystream(hmac.digest(key, b"rho" + check, "sha256")).words(form.words + 16).tolist()
        below = [number % 2 ** form.modulus.bit_length() for number in drawn]
        rho.append([number for number in below if number < form.modulus][: form.words])
    numbers = Keystream(hmac.digest(key, b"s\0", "sha256")).words(4 * chunks).tolist()
    wide = [low + 2**64 * high for low, high in zip(numbers[::2], numbers[1::2], strict=True)]
    return rho, [wide[::2], wide[1::2]]


@every_kind
def test_the_hash_is_the_sum_of_products_by_hand(kind: str) -> None:
    """Against plain integers of Python, for random words and for the largest that there are."""
    modulus, words = FORMS[kind].modulus, words_of(kind, 10)
    words[1], words[9, 5:] = 0, modulus - 1
    rho, factors = coefficients(kind, len(words))
    rows = words.tolist()
    expected = tuple(
        sum(s * sum(map(int.__mul__, rho[check], row)) for s, row in zip(factors[check], rows, strict=True)) % modulus
        for check in range(2)
    )
    assert hash_of(kind, words) == expected


@every_kind
def test_coefficients_that_are_as_large_as_can_be_are_added_exactly(kind: str) -> None:
    """Rounding would show where every product has its most bits."""
    form = FORMS[kind]
    one = Authenticator(KEY, form)
    one._pieces = np.full_like(one._pieces, one._pieces.max())
    words = np.full((9, form.words), form.modulus - 1, dtype=np.uint64)
    pieces = one._pieces.reshape(form.words, 2, -1)
    half = len(one._weights) // 2
    rho = sum(int(piece) * weight for piece, weight in zip(pieces[0, 0], one._weights[:half], strict=True))
    factors = coefficients(kind, 9)[1]
    hasher = one.hasher()
    hasher.take(words)
    inner = form.words * rho * (form.modulus - 1)
    assert hasher.value() == tuple(sum(factors[check]) * inner % form.modulus for check in range(2))


@every_kind
def test_portions_make_no_difference(kind: str) -> None:
    words = words_of(kind, 21)
    hasher = authenticator(kind).hasher()
    for first, last in ((0, 1), (1, 1), (1, 18), (18, 21)):
        hasher.take(words[first:last])
    assert hasher.value() == hash_of(kind, words)


# What is changed is noticed.


@every_kind
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_one_changed_word_is_noticed_wherever_it_is_and_by_whatever(kind: str, data: st.DataObject) -> None:
    form, total = FORMS[kind], three(kind)
    words = total.words.copy()
    at = data.draw(st.integers(0, 2)), data.draw(st.integers(0, form.words - 1))
    by = data.draw(st.one_of(st.integers(1, form.modulus - 1), st.integers(0, 59).map(lambda shift: 2**shift)))
    words[at] = (int(words[at]) + by) % form.modulus
    assert not fits(replace(total, words=words))


@every_kind
def test_multiples_swaps_and_moved_chunks_are_noticed(kind: str) -> None:
    total = three(kind)
    words, half = total.words, FORMS[kind].words // 2
    swapped_places, swapped_halves, one_for_another = words.copy(), words.copy(), words.copy()
    swapped_places[1, [3, 4]] = words[1, [4, 3]]
    swapped_halves[:, :half], swapped_halves[:, half:] = words[:, half:], words[:, :half]
    one_for_another[0] = words[1]
    negative = np.uint64(FORMS[kind].modulus) - words
    changed = [np.zeros_like(words), negative, words[::-1], words[[0, 2, 1]], words[:, ::-1], np.roll(words, 1, axis=1)]
    changed += [swapped_places, swapped_halves, one_for_another, words[:2], np.concatenate([words, words[:1]])]
    for other in changed:
        assert not fits(with_words(total, np.ascontiguousarray(other)))


@every_kind
def test_both_checks_count(kind: str) -> None:
    total, modulus = three(kind), FORMS[kind].modulus
    first, second = total.tag
    for tag in (((first + 1) % modulus, second), (first, (second + 1) % modulus), (second, first), NO_TAG):
        assert not fits(replace(total, tag=tag))


@every_kind
def test_left_out_added_replayed_and_renamed_members_are_noticed(kind: str) -> None:
    updates = [update(kind, index, words_of(kind, 3, index)) for index in range(4)]
    total, two = sum_of(kind, updates[:3]), sum_of(kind, updates[:2])
    a, b, c = total.head.members
    assert fits(total) and fits(with_members(total, c, b, a)) and fits(sum_of(kind, updates[:1]))
    # Left out of the words, of the tag, or of the names; in them twice; another in its place.
    assert not fits(replace(total, words=two.words))
    assert not fits(replace(total, tag=two.tag))
    assert not fits(with_members(total, a, b))
    assert not fits(with_members(total, a, b, c, c))
    assert not fits(with_members(total, a, b, updates[3].head.members[0]))
    assert not fits(with_members(sum_of(kind, [*updates[:3], updates[0]]), a, b, c))


@every_kind
def test_no_field_of_a_member_may_be_told_otherwise(kind: str) -> None:
    total = three(kind)
    a, b, c = total.head.members
    other = bytes(range(32))
    for name, value in {
        "update_id": "silo2/2", "round": 1, "nonce": other[:16], "chain": other, "digest": other, "annex": other,
    }.items():  # fmt: skip
        assert not fits(with_members(total, a, b, replace(c, **{name: value})))  # type: ignore[arg-type]
    # Each digest stays with its own member.
    assert not fits(with_members(total, a, replace(b, digest=c.digest), replace(c, digest=b.digest)))


@every_kind
def test_no_field_of_the_message_that_senders_knew_may_be_told_otherwise(kind: str) -> None:
    total, other = three(kind), bytes(range(1, 33))
    of = total.head
    for name, value in {"attempt": 4, "epoch": 6, "fingerprint": other[:16], "grid": other, "chunks": 4}.items():
        changed = replace(of, **{name: value})  # type: ignore[arg-type]
        assert not fits(replace(total, head=changed)), name
    assert not fits(replace(total, head=replace(of, packing=Packing(8, of.form.slot_bits))))


def test_sums_of_masked_and_unmasked_updates_are_not_mixed() -> None:
    """Same words, same modulus."""
    total = three("bfv")
    assert not fits(replace(total, head=replace(total.head, form=FORMS["masked"])))


# No pad hides two messages.


def test_nothing_is_tagged_before_its_words_have_a_digest() -> None:
    with pytest.raises(PolicyError, match="digest"):
        authenticator("bfv").tag((1, 2), head("bfv"))


def test_the_pad_is_a_prf_of_the_context_by_hand() -> None:
    form: Form = FORMS["bfv"]
    of = head("bfv", members=(replace(member(0), digest=hashlib.sha256(b"words").digest()),))
    key = hmac.digest(hmac.digest(KEY, b"fedsync tag 2\0\1", "sha256"), b"pad\0", "sha256")
    wide = hmac.digest(key, b"fedsync pad of a tag 1\0" + member_context(of, of.members[0]), "sha512")
    expected = tuple(int.from_bytes(part, "little") % form.modulus for part in (wide[:32], wide[32:]))
    assert authenticator("bfv").tag(NO_TAG, of) == expected


# What is opened is what was authenticated.


@every_kind
def test_words_are_given_out_span_by_span_as_they_were_authenticated(kind: str) -> None:
    chunks = 2 * SPAN_BYTES // FORMS[kind].chunk_bytes + 1
    of = sum_of(kind, [update(kind, 0, words_of(kind, chunks))])
    authentic = authenticator(kind).authenticate(of, "server")
    found = list(authentic.spans())
    assert len(found) == 3
    np.testing.assert_array_equal(np.concatenate(found), of.words)
    np.testing.assert_array_equal(authentic.first, of.words[:1])
    assert not any(np.shares_memory(span, of.words) for span in found), "nobody can change what is handed out"


@every_kind
def test_a_file_that_changes_once_its_tag_was_checked_is_opened_up_to_there_at_most(kind: str, tmp_path: Path) -> None:
    form = FORMS[kind]
    chunks = 2 * SPAN_BYTES // form.chunk_bytes + 1
    of = sum_of(kind, [update(kind, 0, words_of(kind, chunks))])
    file = tmp_path / "sum"
    file.write_bytes(of.words.tobytes())
    mapped = replace(of, words=map_file(file, np.uint64).reshape(of.words.shape))
    authentic = authenticator(kind).authenticate(mapped, "server")
    per_span = SPAN_BYTES // form.chunk_bytes
    for chunk, opened in ((0, 0), (per_span - 1, 0), (per_span, 1), (chunks - 1, 2)):
        _write_word(file, chunk * form.words + 7, int(of.words[chunk, 7]) ^ 1)
        found = []
        with pytest.raises(ProtocolError) as refused:
            for span in authentic.spans():
                found.append(span)
        assert (len(found), refused.value.check) == (opened, "tag")
        _write_word(file, chunk * form.words + 7, int(of.words[chunk, 7]))
    _write_word(file, 7, 2**64 - 1)
    with pytest.raises(ProtocolError, match="modulus"):
        next(authentic.spans())
    _write_word(file, 7, int(of.words[0, 7]))
    assert sum(map(len, authentic.spans())) == chunks, "as it was before"


def _write_word(file: Path, place: int, word: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(8 * place)
        opened.write(word.to_bytes(8, "little"))
