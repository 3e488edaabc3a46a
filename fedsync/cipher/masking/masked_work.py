"""Limit on how much the local work of silos may differ within one masked sum.

If one silo does two hundred steps and the other silos do one step, the sum is almost that silo's update. So each update
states its work in its annex, and the list of survivors repeats it. No silo signs a list in which one update has more
than ``work_ratio`` times the work of another. Each silo's owner limits the run's ratio (``seal.work_ratio`` in
silo.yaml). An evaluation-only update is all zeros, and counts as no work.

| figure | its ratio limits the ratio of |
|---|---|
| steps | the distances that training can cover |
| samples | the weights of updates, if updates are weighted by samples |
| way | steps, multiplied by samples if updates are weighted by samples |
| budget | the time limits of orders, for training code that counts no steps |
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
    """Work behind an update; ``way`` in units of 2^-20, ``budget`` in milliseconds, 0 without a limit."""

    BYTES: ClassVar = _PACKED.size

    steps: int
    samples: int
    way: int
    budget: int

    @classmethod
    def of(cls, order: WorkOrder, done: WorkReport, way: int) -> Self:
        """Work done of an order; ``way`` in steps, times the samples if updates are weighted by samples."""
        if order.scores_only:
            return cls(0, 0, 0, 0)
        budget = 0 if order.budget_s is None else max(1, min(round(order.budget_s * 1000), 2**63))
        return cls(done.steps, done.samples, max(1, min(way * _POINT, 2**63)), budget)

    def pack(self) -> bytes:
        return _PACKED.pack(*astuple(self))

    @classmethod
    def unpack(cls, data: bytes, sender: str) -> Self:
        if len(data) != cls.BYTES:
            raise ProtocolError(sender, "work", f"{len(data)} bytes, not {cls.BYTES}")
        found = cls(*_PACKED.unpack(data))
        if max(found.steps, found.samples) > MAX_COUNT:
            raise ProtocolError(sender, "work", f"{found.steps} steps, {found.samples} samples")
        return found


def comparable(works: Collection[WorkDone], ratio: float) -> bool:
    return all(max(figure) <= ratio * min(figure) for figure in zip(*map(astuple, works), strict=True))


def most_comparable(works: Mapping[Key, Collection[WorkDone]], ratio: float) -> set[Key]:
    """Select comparable updates: figure by figure the largest set, and among equal sets the set with more work."""
    left = dict(works)
    for at in range(len(fields(WorkDone))):
        figures = {key: [astuple(work)[at] for work in each] for key, each in left.items()}
        spans = {key: (min(figure), max(figure)) for key, figure in figures.items()}
        best: set[Key] = set()
        for least in sorted({low for low, _ in spans.values()}, reverse=True):
            fitting = {key for key, (low, high) in spans.items() if least <= low and high <= ratio * least}
            best = max(best, fitting, key=len)
        left = {key: left[key] for key in left if key in best}
    return set(left)
