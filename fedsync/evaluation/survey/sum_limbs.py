"""Encoding of exact integer sums as float32 model values, for surveys (joint statistics of the silos' tables).

The transported values are means over silos, float32, on a grid of at most 16 bits. So each integer is cut into limbs of
8 bits, lowest first; the highest limb has the sign. A limb is sent divided by 16, because silos agree on ranges up to
16 before anything is sent. The mean of limbs, times the number of silos, is an integer again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedsync.common.errors import ConfigError, ProtocolError
from fedsync.model.layout import Vector

MOST_SILOS = 128
"""Largest number of silos for which float32 means yield exact integers."""

LIMB, FULL = 8, 255
SHARE = 16
NEAR = 0.25


class LimbReader:
    """Reader of integers from a mean of ``silos`` vectors, float64 [values]."""

    def __init__(self, part: NDArray[np.float64], silos: int) -> None:
        sums = part * (SHARE * silos)
        whole = np.rint(sums)
        if silos and np.abs(sums - whole).max(initial=0.0) > NEAR:
            raise spoiled("it is not of whole numbers")
        self._limbs = iter(whole.astype(np.int64).tolist())

    def take(self, limbs: int) -> int:
        return sum(next(self._limbs) << (LIMB * at) for at in range(limbs))


def silos_of(places: NDArray[np.float64]) -> int:
    """Return the number of silos whose marks are in a mean: each mark is 255 sixteenths over that number."""
    marks = places[places > 0]
    if not marks.size:
        return 0
    silos = round(FULL / SHARE / float(marks.min()))
    if silos > MOST_SILOS:
        raise spoiled(f"it is said to be of {silos} silos, at most {MOST_SILOS}")
    return silos


def limbs(number: int, count: int) -> list[int]:
    low = [(number >> (LIMB * at)) & FULL for at in range(count - 1)]
    high = number >> (LIMB * (count - 1))
    if not -(FULL + 1) // 2 <= high <= FULL // 2:
        raise ConfigError("task", "the silo has more rows than a survey can count", "Leave the survey out")
    return [*low, high]


def sent(parts: Sequence[int]) -> Vector:
    return np.array(parts, dtype=np.float32) / np.float32(SHARE)


def spoiled(detail: str) -> ProtocolError:
    return ProtocolError("sum of silos", "survey", detail)
