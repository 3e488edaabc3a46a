"""Values share slots and come apart again, exactly, up to the number of additions that is allowed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsync.cipher.encoding.packing import BITS, SLOTS, Packing
from fedsync.common.errors import ConfigError

every_arrangement = pytest.mark.parametrize(
    "packing", [Packing(bits, slot_bits) for bits in BITS for slot_bits in (48, 64)], ids=str
)


@every_arrangement
def test_the_largest_sums_of_all_lanes_at_once_come_apart(packing: Packing) -> None:
    largest = packing.additions * packing.peak
    integers = np.resize(np.array([largest, -largest, -largest, largest, 0, -1, 1], np.int32), packing.per_chunk)
    np.testing.assert_array_equal(packing.unpack(packing.pack(integers)), integers)


def test_a_slot_is_the_sum_of_its_shifted_lanes() -> None:
    packing = Packing(16)
    integers = np.zeros(packing.per_chunk, np.int32)
    integers[5], integers[SLOTS + 5] = -3, 7  # lanes 0 and 1 of slot 5
    slots = packing.pack(integers)
    assert slots.shape == (1, SLOTS)
    assert slots[0, 5] == 7 * 2**24 - 3
    assert np.count_nonzero(slots) == 1


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(BITS), st.sampled_from([48, 64]), st.data())
def test_the_sum_of_slots_is_the_slots_of_the_sum(bits: int, slot_bits: int, data: st.DataObject) -> None:
    packing = Packing(bits, slot_bits)
    count = data.draw(st.integers(1, packing.additions))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    updates = rng.integers(-packing.peak, packing.peak + 1, (count, packing.per_chunk), dtype=np.int32)
    slots = sum(packing.pack(update) for update in updates)
    np.testing.assert_array_equal(packing.unpack(np.asarray(slots)), updates.sum(axis=0))


@pytest.mark.parametrize(("bits", "slot_bits"), [(10, 48), (16, 50)])
def test_other_arrangements_are_refused(bits: int, slot_bits: int) -> None:
    with pytest.raises(ConfigError, match="Choose 8, 12 or 16"):
        Packing(bits, slot_bits)
