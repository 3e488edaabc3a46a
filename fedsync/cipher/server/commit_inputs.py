"""Per-commit inputs of the encrypted sum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedsync.cipher.encoding import sealed_wire as wire
from fedsync.cipher.encoding.catch_up import LinkEntry
from fedsync.cipher.server.inbox import Update
from fedsync.cipher.suites.suite import Member
from fedsync.model.layout import Vector


@dataclass(frozen=True, slots=True)
class Brought:
    """Link entry of a commit, and the members of its sums."""

    entry: LinkEntry
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Gathered:
    """Updates of a commit, and regions' sums.

    Args:
        by_grid: envelopes that may be added up, by grid.
        singles: all updates; those from a region's sum have no words.
        clear: change of the values in the clear, float32 [clear values].
        summed: whether there is a region's sum.
    """

    by_grid: Mapping[bytes, list[wire.Envelope]]
    singles: tuple[wire.Envelope, ...]
    clear: Vector
    summed: bool

    @property
    def members(self) -> tuple[Member, ...]:
        return tuple(single.head.members[0] for single in self.singles)

    @classmethod
    def of(cls, updates: Mapping[str, Update], weights: Mapping[str, float], clear_values: int) -> Gathered:
        """Group the counting updates; they are scaled up for the weight of updates that do not count.

        ``updates`` has each update by the ids of all that it contains; ``weights`` may cover more updates.
        """
        share = sum(weights[update_id] for update_id in updates) / sum(weights.values())
        clear = np.zeros(clear_values, dtype=np.float32)
        by_grid: dict[bytes, list[wire.Envelope]] = {}
        singles: list[wire.Envelope] = []
        apart = list(dict.fromkeys(updates.values()))
        for update in apart:
            by_grid.setdefault(update.grid, []).append(update.envelope)
            singles += update.singles
            weight = sum(weights[update_id] for update_id in update.update_ids)
            clear += np.float32(weight / share) * update.clear
        return cls(by_grid, tuple(singles), clear, len(apart) < len(singles))
