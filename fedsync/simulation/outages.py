"""Outages of a simulated machine: random crashes, planned faults, closed availability windows, and final departure."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from fedsync.common.rng import Stream, generator
from fedsync.config.cluster import CrashesConfig, SiloConfig, WindowsConfig

_BLOCK = 8


class Outage(NamedTuple):
    """Absence of a silo from ``at_s`` to ``back_s``, which may be infinite."""

    at_s: float
    back_s: float
    reason: str


def outages(config: SiloConfig, seed: int) -> Iterator[Outage]:
    """Yield all absences of a silo after its first join, in order; touching absences are merged."""
    kinds: list[Iterator[Outage]] = [
        iter(sorted(Outage(fault.at_s, fault.at_s + fault.down_s, "fault by plan") for fault in config.faults))
    ]
    if config.crashes is not None:
        kinds.append(_crashes(config.crashes, config.name, config.joins_at_s, seed))
    if config.presence is not None:
        kinds.append(_closed(config.presence, config.joins_at_s))
    if config.leaves_at_s is not None:
        kinds.append(iter([Outage(config.leaves_at_s, math.inf, "left")]))
    return _united(heapq.merge(*kinds))


def _crashes(config: CrashesConfig, silo: str, joins_at_s: float, seed: int) -> Iterator[Outage]:
    """Yield crashes with exponential times to failure and of repair, in blocks of 8 from (seed, silo, block)."""
    now_s = joins_at_s
    for block in itertools.count():
        draws = generator(seed, Stream.CRASHES, silo, block).exponential((config.mtbf_s, config.repair_s), (_BLOCK, 2))
        for up_s, down_s in draws.tolist():
            at_s = now_s + up_s
            now_s = at_s + down_s
            yield Outage(at_s, now_s, "crash")


def _closed(windows: WindowsConfig, joins_at_s: float) -> Iterator[Outage]:
    for number in itertools.count():
        begin_s = joins_at_s + number * windows.every_s
        yield Outage(begin_s + windows.for_s, begin_s + windows.every_s, "its window is over")


def _united(spans: Iterator[Outage]) -> Iterator[Outage]:
    current = next(spans, None)
    while current is not None:
        following = next(spans, None) if current.back_s < math.inf else None
        if following is not None and following.at_s <= current.back_s:
            current = current._replace(back_s=max(current.back_s, following.back_s))
            continue
        yield current
        current = following
