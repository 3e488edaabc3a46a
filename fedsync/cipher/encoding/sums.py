"""Encoding of statistics in an update's header: slots and limbs as the module `tally` describes them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fedsync.cipher.encoding.packing import Slots
from fedsync.core.orders import Evaluation
from fedsync.evaluation.metrics.classes import ClassCounts
from fedsync.evaluation.metrics.metric_types import Statistic
from fedsync.evaluation.metrics.score_histograms import ScoreCounts

LIMB_BITS = 24

LIMBS, POINT = 4, 20  # default: four slots, in units of 2^-20


def fixed(number: float, point: int = POINT) -> int:
    """Convert to the nearest integer multiple of 2^-point, or raise `ValueError` if not finite."""
    if not math.isfinite(number):
        raise ValueError(f"{number} cannot be sent")
    return round(math.ldexp(number, point))


def figure(number: float, point: int = POINT, limbs: int = LIMBS) -> int:
    """Convert like `fixed`, but saturate large finite numbers: a diverging model has figures of any size."""
    bits = LIMB_BITS * limbs - 1
    if math.isfinite(number) and abs(number) > math.ldexp(1.0, bits - point):
        return ((1 << bits) - 1) * (1 if number > 0 else -1)
    return fixed(number, point)


def put(slots: Slots, at: int, number: int, limbs: int = LIMBS) -> None:
    """Write one silo's number from slot ``at`` on, or raise `ValueError` if it is too large."""
    most = 1 << (LIMB_BITS * limbs - 1)  # the highest limb of one summand stays within its 24 bits
    if not -most <= number < most:
        raise ValueError(f"{number} is too large to be sent")
    mask = (1 << LIMB_BITS) - 1
    for limb in range(limbs - 1):
        slots[at + limb] = (number >> (LIMB_BITS * limb)) & mask
    slots[at + limbs - 1] = number >> (LIMB_BITS * (limbs - 1))


def number(slots: Slots, at: int) -> float:
    """Read a sum over silos of numbers that `fixed` and `put` wrote."""
    return math.ldexp(get(slots, at), -POINT)


def get(slots: Slots, at: int, limbs: int = LIMBS) -> int:
    return sum(int(slots[at + limb]) << (LIMB_BITS * limb) for limb in range(limbs))


MAX_CELL = (1 << 24) - 1  # largest count that one silo may send for a statistic

_LIMBS, _POINT = 6, 64


def slots_of(statistic: Statistic) -> int:
    return statistic.size * (1 if statistic.whole else _LIMBS)


def sealable(statistic: Statistic, sums: Sequence[float]) -> Slots:
    """Encode one silo's sums, int64 [slots_of(statistic)]; `ValueError` for a wrong number of sums or a bad sum."""
    if len(sums) != statistic.size:
        raise ValueError(f"{len(sums)} sums of {statistic.key}, which has {statistic.size}")
    if statistic.whole:
        counts = np.array(sums, dtype=np.float64)
        if not ((counts >= 0) & (counts <= MAX_CELL) & (counts == np.floor(counts))).all():
            raise ValueError(f"{statistic.key} has counts that are not whole, or outside 0..{MAX_CELL}")
        return counts.astype(np.int64)
    slots = np.zeros(len(sums) * _LIMBS, dtype=np.int64)
    for index, number in enumerate(sums):
        put(slots, index * _LIMBS, figure(number, _POINT, _LIMBS), _LIMBS)
    return slots


def summed(statistic: Statistic, slots: Slots) -> tuple[float, ...]:
    """Decode sums over all silos; each is rounded to the nearest float."""
    if statistic.whole:
        return tuple(slots.astype(np.float64).tolist())
    places = range(0, len(slots), _LIMBS)
    return tuple(math.ldexp(get(slots, at, _LIMBS), -_POINT) for at in places)


def fault_of(evaluation: Evaluation, evaluators: int, statistics: Sequence[Statistic]) -> str:
    """Reason why ``evaluators`` silos cannot have found this evaluation together; empty if they can."""
    for one in statistics:
        sums = evaluation.sums[one.key]
        most = MAX_CELL if one.whole else math.ldexp(1.0, LIMB_BITS * _LIMBS - 1 - _POINT)
        if max(sums) > evaluators * most or min(sums) < (0 if one.whole else -evaluators * most):
            return f"sums of {one.key} are larger than {evaluators} silos can produce"
        array = np.array(sums)
        problem = one.problem(array)
        # For other statistics, the number of samples cannot be derived from the sums.
        counted = sum(one.support(array).values()) if isinstance(one, ClassCounts | ScoreCounts) else evaluation.samples
        if problem or counted != evaluation.samples:
            return f"sums of {one.key}: {problem or f'{counted} of {evaluation.samples} samples'}"
    return ""
