"""Numbers that are larger than a slot may be: limbs of 24 bits, the lowest first; the highest carries the sign."""

from __future__ import annotations

import math

from fedsync.cipher.encoding.packing import Slots

LIMB_BITS = 24

LIMBS, POINT = 4, 20
"""Of most numbers: four slots, in units of 2^-20."""


def fixed(number: float, point: int = POINT) -> int:
    """The nearest multiple of 2^-point, as how many that is; `ValueError` if it is not finite."""
    if not math.isfinite(number):
        raise ValueError(f"{number} cannot be sent")
    return round(math.ldexp(number, point))


def figure(number: float, point: int = POINT, limbs: int = LIMBS) -> int:
    """As `fixed`, or the nearest that can be sent: a model that diverges has figures of any size."""
    if math.isfinite(number) and abs(number) > math.ldexp(1.0, LIMB_BITS * limbs - 1 - point):
        return (_largest(limbs) - 1) * (1 if number > 0 else -1)
    return fixed(number, point)


def _largest(limbs: int) -> int:
    """The highest limb of a summand stays within its 24 bits."""
    return 1 << (LIMB_BITS * limbs - 1)


def put(slots: Slots, at: int, number: int, limbs: int = LIMBS) -> None:
    """Write one silo's number from slot ``at`` on; `ValueError` if it is too large."""
    if not -_largest(limbs) <= number < _largest(limbs):
        raise ValueError(f"{number} is too large to be sent")
    mask = (1 << LIMB_BITS) - 1
    for limb in range(limbs - 1):
        slots[at + limb] = (number >> (LIMB_BITS * limb)) & mask
    slots[at + limbs - 1] = number >> (LIMB_BITS * (limbs - 1))


def number(slots: Slots, at: int) -> float:
    """What `put` wrote of `fixed`, summed over silos."""
    return math.ldexp(get(slots, at), -POINT)


def get(slots: Slots, at: int, limbs: int = LIMBS) -> int:
    """What `put` wrote, summed over silos."""
    return sum(int(slots[at + limb]) << (LIMB_BITS * limb) for limb in range(limbs))
