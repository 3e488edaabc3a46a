"""Numbers larger than a slot: limbs of 24 bits, lowest first; the highest limb carries the sign."""

from __future__ import annotations

import math

from fedsync.cipher.encoding.packing import Slots

LIMB_BITS = 24

LIMBS, POINT = 4, 20
"""Default: four slots, in units of 2^-20."""


def fixed(number: float, point: int = POINT) -> int:
    """Convert to the nearest integer multiple of 2^-point, or raise `ValueError` if ``number`` is not finite."""
    if not math.isfinite(number):
        raise ValueError(f"{number} cannot be sent")
    return round(math.ldexp(number, point))


def figure(number: float, point: int = POINT, limbs: int = LIMBS) -> int:
    """Convert like `fixed`, but saturate large finite numbers: a diverging model has figures of any size."""
    if math.isfinite(number) and abs(number) > math.ldexp(1.0, LIMB_BITS * limbs - 1 - point):
        return (_largest(limbs) - 1) * (1 if number > 0 else -1)
    return fixed(number, point)


def _largest(limbs: int) -> int:
    """Bound that keeps the highest limb of one summand within its 24 bits."""
    return 1 << (LIMB_BITS * limbs - 1)


def put(slots: Slots, at: int, number: int, limbs: int = LIMBS) -> None:
    """Write one silo's number from slot ``at`` on, or raise `ValueError` if it is too large."""
    if not -_largest(limbs) <= number < _largest(limbs):
        raise ValueError(f"{number} is too large to be sent")
    mask = (1 << LIMB_BITS) - 1
    for limb in range(limbs - 1):
        slots[at + limb] = (number >> (LIMB_BITS * limb)) & mask
    slots[at + limbs - 1] = number >> (LIMB_BITS * (limbs - 1))


def number(slots: Slots, at: int) -> float:
    """Read a sum over silos of numbers that `fixed` and `put` wrote."""
    return math.ldexp(get(slots, at), -POINT)


def get(slots: Slots, at: int, limbs: int = LIMBS) -> int:
    """Read a sum over silos of numbers that `put` wrote."""
    return sum(int(slots[at + limb]) << (LIMB_BITS * limb) for limb in range(limbs))
