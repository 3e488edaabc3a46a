"""Amounts of work behind masked updates, and the bound within which masks hide an update among others.

A mask hides an update among those that it is added to. If one silo does two hundred steps and the others do one, the
sum is that silo's update. So each update says in its annex how much work is behind it, the list of survivors repeats
that, and no silo signs a list in which one update is more than ``work_ratio`` times the work of another. The factor is
in the run's specification. Each silo's owner says how large it may be (``seal.work_ratio`` in silo.yaml).

| figure | bounds |
|---|---|
| steps | how far training leads |
| samples | what an update counts where the mean is weighed by them |
| way | sum of the learning rates of all steps, in units of the order's: a schedule makes equal steps unequal; times |
| | the samples where these are the update's weight, for it is as large in the sum |
| budget | what training code that counts no steps of its own is told of time |

An update that only scores is zeros, and no work.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Hashable, Mapping
from dataclasses import astuple, dataclass, fields
from typing import ClassVar, Self, TypeVar

from fedsync.common.errors import ProtocolError
from fedsync.core.orders import WorkOrder, WorkReport
from fedsync.core.report_checks import MAX_COUNT

Key = TypeVar("Key", bound=Hashable)

_PACKED = struct.Struct("<4Q")
_POINT = 2**20


@dataclass(frozen=True, slots=True)
class WorkDone:
    """The work behind an update.

    Args:
        steps: local steps.
        samples: that they processed.
        way: sum of learning rates, in units of the order's by 2^-20, times the weight in samples if updates have one.
        budget: milliseconds that the order had, 0 without a limit.
    """

    BYTES: ClassVar = _PACKED.size

    steps: int
    samples: int
    way: int
    budget: int

    @classmethod
    def of(cls, order: WorkOrder, done: WorkReport, way: float) -> Self:
        """The work done of an order; ``way`` in units of its learning rate, times the weight if that is by samples."""
        if order.scores_only:
            return cls(0, 0, 0, 0)
        budget = 0 if order.budget_s is None else max(1, min(round(order.budget_s * 1000), 2**63))
        return cls(done.steps, done.samples, max(1, min(round(way * _POINT), 2**63)), budget)

    def pack(self) -> bytes:
        return _PACKED.pack(*astuple(self))

    @classmethod
    def unpack(cls, data: bytes, sender: str) -> Self:
        """The inverse of `pack`.

        Raises:
            ProtocolError: the sender sent something else.
        """
        if len(data) != cls.BYTES:
            raise ProtocolError(sender, "work", f"{len(data)} bytes, not {cls.BYTES}")
        found = cls(*_PACKED.unpack(data))
        if max(found.steps, found.samples) > MAX_COUNT:
            raise ProtocolError(sender, "work", f"{found.steps} steps, {found.samples} samples")
        return found


@dataclass(frozen=True, slots=True)
class Limit:
    """The work behind a silo's own update, and how many times the work of one update may be that of another."""

    work: WorkDone
    ratio: float


def comparable(works: Collection[WorkDone], ratio: float) -> bool:
    """Whether no figure of one is more than ``ratio`` times that of another."""
    return all(max(figure) <= ratio * min(figure) for figure in zip(*map(astuple, works), strict=True))


def most_comparable(works: Mapping[Key, Collection[WorkDone]], ratio: float) -> set[Key]:
    """Comparable updates: figure by figure the most that are left, of equals those with more work.

    Args:
        works: of each update, or of all that are in a region's sum.
        ratio: as in `comparable`.
    """
    left = dict(works)
    for at in range(len(fields(WorkDone))):
        spans = {key: _span(each, at) for key, each in left.items()}
        best: set[Key] = set()
        for least in sorted({low for low, _ in spans.values()}, reverse=True):
            fitting = {key for key, (low, high) in spans.items() if least <= low and high <= ratio * least}
            best = max(best, fitting, key=len)
        left = {key: left[key] for key in left if key in best}
    return set(left)


def _span(works: Collection[WorkDone], at: int) -> tuple[int, int]:
    """Least and largest value of a figure."""
    figure = [astuple(work)[at] for work in works]
    return min(figure), max(figure)
