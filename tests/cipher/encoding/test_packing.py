"""Values share slots and come apart again, exactly, up to the number of additions that is allowed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsync.cipher.encoding.packing import BITS, SLOTS, Packing
from fedsync.core.errors import ConfigError

every_arrangement = pytest.mark.parametrize(
    "lanes", [Packing(bits, slot_bits) for bits in BITS for slot_bits in (48, 64)], ids=str
)


@pytest.mark.parametrize(("bits", "count", "width", "additions"), [(16, 2, 24, 200), (12, 3, 16, 15), (8, 4, 12, 16)])
def test_arrangements_of_48_bits(bits: int, count: int, width: int, additions: int) -> None:
    lanes = Packing(bits)
    assert (lanes.count, lanes.width, lanes.additions) == (count, width, additions)


@every_arrangement
def test_lanes_fit_the_slot_and_sums_fit_the_lanes(lanes: Packing) -> None:
    assert lanes.count * lanes.width <= lanes.slot_bits
    assert lanes.additions * lanes.peak < 2 ** (lanes.width - 1)


@every_arrangement
def test_the_largest_sums_of_all_lanes_at_once_come_apart(lanes: Packing) -> None:
    largest = lanes.additions * lanes.peak
    integers = np.resize(np.array([largest, -largest, -largest, largest, 0, -1, 1], np.int32), lanes.per_chunk)
    np.testing.assert_array_equal(lanes.unpack(lanes.pack(integers)), integers)


def test_a_slot_is_the_sum_of_its_shifted_lanes() -> None:
    lanes = Packing(16)
    integers = np.zeros(lanes.per_chunk, np.int32)
    integers[5], integers[SLOTS + 5] = -3, 7  # lanes 0 and 1 of slot 5
    slots = lanes.pack(integers)
    assert slots.shape == (1, SLOTS)
    assert slots[0, 5] == 7 * 2**24 - 3
    assert np.count_nonzero(slots) == 1


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(BITS), st.sampled_from([48, 64]), st.data())
def test_the_sum_of_slots_is_the_slots_of_the_sum(bits: int, slot_bits: int, data: st.DataObject) -> None:
    lanes = Packing(bits, slot_bits)
    count = data.draw(st.integers(1, lanes.additions))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    updates = rng.integers(-lanes.peak, lanes.peak + 1, (count, lanes.per_chunk), dtype=np.int32)
    slots = sum(lanes.pack(update) for update in updates)
    np.testing.assert_array_equal(lanes.unpack(np.asarray(slots)), updates.sum(axis=0))


@pytest.mark.parametrize(("bits", "slot_bits"), [(10, 48), (16, 50)])
def test_other_arrangements_are_refused(bits: int, slot_bits: int) -> None:
    with pytest.raises(ConfigError, match="Choose 8, 12 or 16"):
        Packing(bits, slot_bits)
