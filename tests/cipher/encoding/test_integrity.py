"""A tag fits the sum of exactly those updates that are named, and nothing else."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsync.cipher.encoding.integrity import Tagger, added
from fedsync.cipher.encoding.packing import SLOTS, Slots
from fedsync.cipher.encoding.wire import NO_TAG, TAG_MODULUS, Tag
from fedsync.cipher.suites.pad import Keystream
from fedsync.cipher.suites.suite import Member
from fedsync.core.errors import ProtocolError
from tests.cipher.sealers import member, slots_of

KEY = bytes(range(32))


def tag_of(slots: Slots, one: Member, context: bytes = b"") -> Tag:
    tagger = Tagger(KEY, context)
    tagger.take(slots)
    return tagger.tag(one)


def fits(slots: Slots, tag: Tag, members: list[Member], context: bytes = b"", key: bytes = KEY) -> bool:
    tagger = Tagger(key, context)
    tagger.take(slots)
    try:
        tagger.check(tag, members, "server")
    except ProtocolError as error:
        assert (error.sender, error.check) == ("server", "tag")
        return False
    return True


def sum_of(tags: list[Tag]) -> Tag:
    total = NO_TAG
    for tag in tags:
        total = added(total, tag)
    return total


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 5), st.sampled_from([20, 45, 61]), st.integers(0, 2**32))
def test_the_sum_of_tags_fits_the_sum_of_updates(count: int, bits: int, seed: int) -> None:
    slots = [slots_of(3, bits, seed + i) for i in range(count)]
    members = [member(i) for i in range(count)]
    total = sum_of([tag_of(one, own) for one, own in zip(slots, members, strict=True)])
    assert fits(np.asarray(sum(slots)), total, members)
    assert fits(np.asarray(sum(slots)), total, members[::-1])


def test_the_tag_is_the_sum_of_products_by_hand() -> None:
    """Against plain integers of Python, with the coefficients that the key gives; also for the extremes."""
    slots = slots_of(2, 47)
    slots[0, :4] = [2**62, -(2**62), 2**63 - 1, -(2**63)]
    tagger = Tagger(KEY)
    coefficients = tagger._coefficients.astype(int).astype(object)
    factors = Keystream(tagger._derived(b"s")).words(16).astype(object)
    blinds = tagger._blinds(member(0))
    expected = [
        (
            sum(factors[8 * b + c] * int((slots[b].astype(object) * coefficients[:, c]).sum()) for b in range(2))
            + blinds[c]
        )
        % TAG_MODULUS
        for c in range(8)
    ]
    assert list(tag_of(slots, member(0))) == expected


def test_portions_make_no_difference() -> None:
    slots = slots_of(21, 47)
    tagger = Tagger(KEY)
    for first, last in ((0, 1), (1, 1), (1, 18), (18, 21)):
        tagger.take(slots[first:last])
    assert tagger.tag(member(0)) == tag_of(slots, member(0))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2), st.integers(0, SLOTS - 1), st.integers(-(2**62), 2**62).filter(bool))
def test_a_changed_slot_is_noticed(chunk: int, slot: int, by: int) -> None:
    slots = slots_of(3, 47)
    tag = tag_of(slots, member(0))
    slots[chunk, slot] += by
    assert not fits(slots, tag, [member(0)])


@pytest.mark.parametrize("by", [2**61 - 1, 2**32, 2**48, TAG_MODULUS - 2**64])
def test_changes_that_vanish_modulo_some_number_are_noticed(by: int) -> None:
    slots = slots_of(1, 47)
    tag = tag_of(slots, member(0))
    slots[0, 9] += by
    assert not fits(slots, tag, [member(0)])


def test_swapped_chunks_and_slots_are_noticed() -> None:
    slots = slots_of(2, 47)
    tag = tag_of(slots, member(0))
    assert not fits(slots[::-1].copy(), tag, [member(0)])
    assert not fits(slots[:, ::-1].copy(), tag, [member(0)])


def test_left_out_added_replayed_and_renamed_contributions_are_noticed() -> None:
    slots = [slots_of(1, 40, seed) for seed in range(4)]
    tags = [tag_of(one, member(i)) for i, one in enumerate(slots)]
    three, members = np.asarray(slots[0] + slots[1] + slots[2]), [member(0), member(1), member(2)]
    total = sum_of(tags[:3])
    assert fits(three, total, members)
    # Left out of the sum, of the tag, or of the names.
    assert not fits(three - slots[1], total, members)
    assert not fits(three, sum_of(tags[:2]), members)
    assert not fits(three, total, members[:2])
    assert not fits(three, total, [*members[:2], member(3)])
    # In it twice.
    assert not fits(three + slots[0], sum_of([*tags[:3], tags[0]]), members)
    # An upload of another round, or an earlier upload of the same update.
    for old in (
        member(2, round_=1),
        Member("silo2/1", 0, b"2" * 16, bytes(32)),
        Member("silo2/2", 0, member(2).nonce, bytes(32)),
    ):
        assert not fits(three, sum_of([*tags[:2], tag_of(slots[2], old)]), members)


def test_other_keys_and_contexts_do_not_fit() -> None:
    slots = slots_of(1, 40)
    tag = tag_of(slots, member(0), b"grid")
    assert fits(slots, tag, [member(0)], b"grid")
    assert not fits(slots, tag, [member(0)], b"other grid")
    assert not fits(slots, tag, [member(0)], b"grid", bytes(32))


def test_tags_of_one_update_under_two_nonces_are_unrelated() -> None:
    slots = slots_of(1, 40)
    one, other = tag_of(slots, member(0)), tag_of(slots, Member("silo0/1", 0, b"n" * 16, bytes(32)))
    assert not set(one) & set(other)
    assert max(one) < TAG_MODULUS
