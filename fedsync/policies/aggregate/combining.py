"""Aggregations that combine single updates instead of adding them up; they need updates in the clear."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedsync.common.errors import PolicyError
from fedsync.model.chunked_arrays import give_back, spans
from fedsync.model.layout import Vector
from fedsync.policies.aggregate.waiting_updates import Taken

Rows = NDArray[np.float32]
"""Float32 [updates, values]: a span of each update of a commit."""


class CommitUpdates:
    """Updates of a commit, readable in spans.

    Update i is multiplied by ``n c_i``, where n is the number of updates and c_i its coefficient from the weigher. So
    the mean of the rows is the weighted sum, and updates with equal coefficients appear as they were sent.
    """

    def __init__(self, taken: Taken, size: int) -> None:
        self._taken, self.size = taken, size
        self.ids: tuple[str, ...] = tuple(taken.weights)
        self.silos: tuple[str, ...] = tuple(update_id.rpartition("/")[0] for update_id in self.ids)

    def rows(self, start: int, stop: int) -> Rows:
        """Values from ``start`` to ``stop`` of all updates, float32 [updates, stop - start]."""
        rows = np.empty((len(self.ids), stop - start), np.float32)
        for row, (update_id, weight) in zip(rows, self._taken.weights.items(), strict=True):
            payload = self._taken.payloads[update_id]
            update = self._taken.formats[update_id].decode(payload, start, stop)
            np.multiply(update, np.float32(len(self.ids) * weight), out=row)
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

    def change(self, updates: CommitUpdates) -> _Change:
        """Return a function that computes spans of the change of a commit."""
        chosen = sorted(set(self._combiner.choose(updates)))
        if not chosen or not set(chosen) <= set(range(len(updates.ids))):
            raise PolicyError(f"{self._name} chooses {chosen} of {len(updates.ids)} updates")
        self._counts["commits"] += 1
        self._counts["few"] += len(updates.ids) < self._combiner.least
        left_out = self._counts["left_out"]
        for place in set(range(len(updates.ids))).difference(chosen):
            silo = updates.silos[place]
            left_out[silo] = left_out.get(silo, 0) + 1
        return _Change(self._combiner, updates, chosen)

    @property
    def _name(self) -> str:
        return _name(self._combiner)

    def notes(self) -> list[str]:
        """Sentences for the result of the run."""
        commits, few, left_out = (self._counts[key] for key in ("commits", "few", "left_out"))
        notes = []
        if few:
            least = self._combiner.least
            notes.append(f"{few} of {commits} commits had fewer than the {least} updates that {self._name} needs")
        if left_out:
            often = sorted(left_out.items(), key=lambda item: (-item[1], item[0]))
            told = ", ".join(f"{silo} {count} times" for silo, count in often)
            notes.append(f"{self._name} left out updates in {commits} commits: {told}")
        return notes


class _Change:
    """Change of one commit, computed in spans."""

    def __init__(self, combiner: Combiner, updates: CommitUpdates, chosen: Sequence[int]) -> None:
        self._combiner, self._updates, self._chosen = combiner, updates, chosen

    def __call__(self, start: int, stop: int) -> Vector:
        """Compute the values from ``start`` to ``stop``.

        Raises:
            PolicyError: the combiner did not return one finite value per column.
        """
        change = np.empty(stop - start, np.float32)
        for begin, end in spans(stop - start, 4 * len(self._updates.ids)):
            change[begin:end] = self._combined(self._updates.rows(start + begin, start + end)[self._chosen])
        return change

    def _combined(self, rows: Rows) -> Vector:
        change = np.asarray(self._combiner.combine(rows), np.float32)
        if change.shape != rows.shape[1:] or not np.isfinite(change).all():
            told = f"shape {change.shape}" if change.shape != rows.shape[1:] else "values that are not finite"
            raise PolicyError(f"{_name(self._combiner)} makes {told} of {rows.shape} values")
        return change


def _name(combiner: Combiner) -> str:
    return combiner.name or type(combiner).__name__
