"""Unencrypted updates of a commit, and the base class of aggregations of single updates, such as median and Krum."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedsync.common import foreign
from fedsync.common.errors import PolicyError, ProtocolError
from fedsync.common.names import told
from fedsync.model.chunked_arrays import give_back, spans
from fedsync.model.layout import Vector
from fedsync.model.plain_wire import FP32, WireFormat
from fedsync.model.running_statistics import Ranges, within
from fedsync.model.server_optimizer import Part
from fedsync.model.transfer import Payload

logger = foreign.logger(__name__)


@dataclass(frozen=True, slots=True)
class Taken:
    """Content of a commit: ``weights`` (coefficients, in the order of the commit), payloads and their wire formats, by
    the update's id or a sum's first id; ``left_out`` are ids of updates that do not count.
    """

    weights: Mapping[str, float]
    payloads: Mapping[str, Payload]
    formats: Mapping[str, WireFormat]
    left_out: tuple[str, ...]


class WaitingUpdates:
    """Pending updates of one run, by id; ``wire`` is the format of single updates.

    A region's sum is the weighted mean of its members, float32 [values], kept under the first of their ids. A sum
    counts only as a whole: if a member is discarded, or missing in the commit of the others, no member counts.
    """

    def __init__(self, wire: WireFormat) -> None:
        self._wire = wire
        self.payloads: dict[str, Payload] = {}
        self.sums: dict[str, tuple[str, ...]] = {}
        """Ids of all members of an update's sum, by update id; the payload of the sum may be gone."""

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*self.payloads, *self.sums]))

    def add(self, sender: str, update_ids: Sequence[str], payload: Payload) -> None:
        """Keep an update, or the sum of several; raises `ProtocolError` if an update id is in use, or named twice."""
        for update_id in update_ids:
            if update_id in self.payloads or update_id in self.sums:
                raise ProtocolError(sender, "update id", f"{update_id!r} is here already")
        if not update_ids or len(set(update_ids)) != len(update_ids):
            raise ProtocolError(sender, "members", f"{len(update_ids)} updates: none, or one occurs twice")
        self.payloads[update_ids[0]] = payload
        if len(update_ids) > 1:
            self.sums.update(dict.fromkeys(update_ids, tuple(update_ids)))

    def discard(self, update_id: str) -> None:
        whole = self.sums.pop(update_id, (update_id,))
        self.payloads.pop(whole[0], None)

    def take(self, weights: Mapping[str, float]) -> Taken:
        """Remove and return the updates of a commit; the others share the weight of updates that do not count. Raises
        `KeyError` if an update is not pending.
        """
        used, left_out = dict[str, tuple[str, ...]](), []
        for update_id in weights:
            whole = self.sums.get(update_id, (update_id,))
            if whole[0] in used:
                continue
            if len(whole) > 1 and (whole[0] not in self.payloads or not weights.keys() >= set(whole)):
                logger.warning("%s is in a region's sum with one that does not count: neither does it", update_id)
                left_out.append(update_id)
            else:
                used[whole[0]] = whole
        payloads = {first: self.payloads.pop(first) for first in used}
        formats = {first: FP32 if len(whole) > 1 else self._wire for first, whole in used.items()}
        for update_id in left_out:
            self.discard(update_id)
        for whole in used.values():
            for member in whole:
                self.sums.pop(member, None)
        own = {first: sum(weights[member] for member in whole) for first, whole in used.items()}
        if left_out and own:
            share = sum(own.values()) / sum(weights.values())
            own = {first: weight / share for first, weight in own.items()}
        return Taken(own, payloads, formats, tuple(left_out))


Rows = NDArray[np.float32]
"""Float32 [updates, values]: a span of each update of a commit."""


class CommitUpdates:
    """Updates of a commit, readable in spans.

    Update i is multiplied by ``n c_i``, where n is the number of updates and c_i its coefficient from the weigher. So
    the mean of the rows is the weighted sum, and updates with equal coefficients appear as they were sent. Running
    statistics, in the ranges ``statistics``, are as sent: a variance that changes too far would be below 0.
    """

    def __init__(self, taken: Taken, size: int, statistics: Ranges = ()) -> None:
        self._taken, self.size, self.statistics = taken, size, statistics
        self.ids: tuple[str, ...] = tuple(taken.weights)
        self.silos: tuple[str, ...] = tuple(update_id.rpartition("/")[0] for update_id in self.ids)

    def rows(self, start: int, stop: int) -> Rows:
        """Values from ``start`` to ``stop`` of all updates, float32 [updates, stop - start]."""
        rows = np.empty((len(self.ids), stop - start), np.float32)
        for row, (update_id, weight) in zip(rows, self._taken.weights.items(), strict=True):
            payload = self._taken.payloads[update_id]
            update = self._taken.formats[update_id].decode(payload, start, stop)
            np.multiply(update, np.float32(len(self.ids) * weight), out=row)
            for part in within(self.statistics, start, stop):
                row[part] = update[part]
            give_back(payload)
        return rows


class Combiner(ABC):
    """Base of classes that derive the change of a commit from its single updates."""

    name: ClassVar[str] = ""
    """Name in errors and in the result of the run. Default: the name of the class."""

    least: ClassVar[int] = 1
    """Fewest updates of a commit for sound results; the result of the run reports commits with fewer."""

    def choose(self, updates: CommitUpdates) -> Sequence[int]:
        """Indices of the updates that count; by default all."""
        return range(len(updates.ids))

    @abstractmethod
    def combine(self, rows: Rows) -> Vector:
        """Return the change of a span, float32 [values], from the chosen rows, [updates, values]."""


class Combining:
    """Combiner in use, with counts for the result of the run; ``counts`` may come from a checkpoint."""

    def __init__(self, combiner: Combiner, counts: dict[str, Any]) -> None:
        self._combiner, self._counts = combiner, counts
        counts.update({"commits": 0, "few": 0, "left_out": {}} | counts)

    def change(self, updates: CommitUpdates) -> Part:
        """Return a commit's change as a function of (start, stop), float32 [stop - start]. Raises `PolicyError` if the
        combiner chooses updates that are not there, or, in a span, did not return one finite value per column.
        """
        chosen = sorted(set(self._combiner.choose(updates)))
        odd = any(isinstance(each, bool) or not isinstance(each, int | np.integer) for each in chosen)
        if odd or not chosen or not set(chosen) <= set(range(len(updates.ids))):
            raise PolicyError(f"{self._name} chooses {chosen} of {len(updates.ids)} updates; return their positions")
        self._counts["commits"] += 1
        self._counts["few"] += len(updates.ids) < self._combiner.least
        left_out = self._counts["left_out"]
        for place in set(range(len(updates.ids))).difference(chosen):
            silo = updates.silos[place]
            left_out[silo] = left_out.get(silo, 0) + 1

        def change(start: int, stop: int) -> Vector:
            made = np.empty(stop - start, np.float32)
            for begin, end in spans(stop - start, 4 * len(updates.ids)):
                made[begin:end] = self._combined(updates.rows(start + begin, start + end)[chosen])
            return made

        return change

    def _combined(self, rows: Rows) -> Vector:
        change = np.asarray(self._combiner.combine(rows), np.float32)
        if change.shape != rows.shape[1:] or not np.isfinite(change).all():
            told = f"shape {change.shape}" if change.shape != rows.shape[1:] else "values that are not finite"
            raise PolicyError(f"{self._name} makes {told} of {rows.shape} values")
        return change

    @property
    def _name(self) -> str:
        return self._combiner.name or type(self._combiner).__name__

    def notes(self) -> list[str]:
        commits, few, left_out = (self._counts[key] for key in ("commits", "few", "left_out"))
        notes = []
        if few:
            least = self._combiner.least
            notes.append(f"{few} of {commits} commits had fewer than the {least} updates that {self._name} needs")
        if left_out:
            notes.append(f"{self._name} left out updates in {commits} commits: {told(left_out)}")
        return notes
