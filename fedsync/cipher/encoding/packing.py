"""Packing of several quantised values into one integer (*slot*) for exact encrypted sums.

A *slot* is one signed integer that an encryption scheme (suite) adds exactly. It has L *lanes* of w bits, wide enough
for the largest allowed sum of quantised values. A *chunk* is 4,096 slots, the content of one ciphertext. The quantised
values q of the model fill a chunk lane by lane, so every operation runs over contiguous memory:

    slot j of chunk c = sum over lanes l of 2^(l w) q[(c L + l) 4096 + j]
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fedsync.common.errors import ConfigError

SLOTS = 4096
MIN_EXPONENT, MAX_EXPONENT = -40, 23
"""Range of a tensor's exponent; smaller values are rounded stochastically at the smallest exponent."""

MAX_CAP = 2**40
Slots = NDArray[np.int64]
"""Slots of chunks, int64 [chunks, 4096]."""

Integers = NDArray[np.int32]
"""Quantised values or their sums, int32 [chunks * lanes * 4096]."""

# Slot bits -> bits -> lanes, lane bits, additions: additions * (2^(bits - 1) - 1) < 2^(lane bits - 1).
_TABLE: dict[int, dict[int, tuple[int, int, int]]] = {
    48: {8: (4, 12, 16), 12: (3, 16, 15), 16: (2, 24, 200)},
    64: {8: (5, 12, 16), 12: (4, 16, 15), 16: (3, 21, 32)},
}
BITS = (8, 12, 16)


@dataclass(frozen=True, slots=True)
class Packing:
    """Arrangement of quantised values in a slot; `ConfigError` if none exists for these numbers.

    A quantised value has ``bits`` 8, 12 or 16, sign included. The suite's slots have ``slot_bits`` 48 (bfv, masked) or
    64 (pad). The result has ``count`` lanes of ``width`` bits; no lane overflows in a sum of up to ``additions``
    updates.
    """

    bits: int
    slot_bits: int = 48
    count: int = field(init=False)
    width: int = field(init=False)
    additions: int = field(init=False)

    def __post_init__(self) -> None:
        found = _TABLE.get(self.slot_bits, {}).get(self.bits)
        if found is None:
            raise ConfigError("cipher.bits", f"{self.bits} bits in slots of {self.slot_bits}", "Choose 8, 12 or 16")
        for name, value in zip(("count", "width", "additions"), found, strict=True):
            object.__setattr__(self, name, value)

    @property
    def peak(self) -> int:
        return (1 << (self.bits - 1)) - 1

    @property
    def per_chunk(self) -> int:
        return self.count * SLOTS

    def pack(self, integers: Integers) -> Slots:
        """Pack quantised values or their sums, int32 [chunks * per_chunk], into slots, int64 [chunks, 4096]."""
        cut = integers.reshape(-1, self.count, SLOTS)
        slots = cut[:, -1].astype(np.int64)
        for lane in range(self.count - 2, -1, -1):
            np.left_shift(slots, self.width, out=slots)
            np.add(slots, cut[:, lane], out=slots)
        return slots

    def unpack(self, slots: Slots) -> Integers:
        """Unpack slots, int64 [chunks, 4096], into int32 [chunks * per_chunk]; every slot has exactly one reading."""
        rest = slots.copy()
        integers = np.empty((len(slots), self.count, SLOTS), dtype=np.int32)
        half, mask = np.int64(1 << (self.width - 1)), np.int64((1 << self.width) - 1)
        for lane in range(self.count):
            # Adding half a lane makes the lane an unsigned field and gives the lanes above the right carry.
            np.add(rest, half, out=rest)
            np.copyto(integers[:, lane], (rest & mask) - half, casting="unsafe")
            np.right_shift(rest, self.width, out=rest)
        return integers.reshape(-1)
