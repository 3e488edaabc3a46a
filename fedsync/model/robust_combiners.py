"""Median, trimmed mean and Krum: combiners of `fedsync.policies.aggregate.robust`, where the sources are cited."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedsync.model.chunked_arrays import spans
from fedsync.model.commit_updates import Combiner, CommitUpdates, Rows
from fedsync.model.layout import Vector
from fedsync.model.running_statistics import within


class MedianCombiner(Combiner):
    """Median of the updates, value by value."""

    name, least = "median", 3

    def combine(self, rows: Rows) -> Vector:
        return np.median(rows, axis=0)


class TrimmedMeanCombiner(Combiner):
    """Mean of the updates, value by value, without the ``share`` of largest and of smallest values."""

    name, least = "trimmed-mean", 3

    def __init__(self, share: float) -> None:
        self._share = share

    def combine(self, rows: Rows) -> Vector:
        each = min(max(int(self._share * len(rows)), 1), (len(rows) - 1) // 2)
        kept = np.sort(rows, axis=0)[each : len(rows) - each]
        mean: Vector = kept.mean(axis=0, dtype=np.float32)
        return mean


class KrumCombiner(Combiner):
    """Mean of the ``keep`` updates that are nearest to their neighbours; ``malicious`` silos may send anything."""

    name = "krum"

    def __init__(self, malicious: int, keep: int, least: int) -> None:
        self._malicious, self._keep = malicious, keep
        self.least = least  # type: ignore[misc]  # depends on the settings here

    def choose(self, updates: CommitUpdates) -> Sequence[int]:
        """Indices of the updates with the nearest ``n - malicious - 2`` neighbours by trained values; O(n^2 values)."""
        count = len(updates.ids)
        products = np.zeros((count, count))
        for start, stop in spans(updates.size, 4 * count):
            rows = updates.rows(start, stop).astype(np.float64)
            for part in within(updates.statistics, start, stop):
                rows[:, part] = 0  # a counter of steps would outweigh all weights
            products += rows @ rows.T
        norms = np.diag(products)
        distances = norms[:, None] + norms[None, :] - 2 * products
        np.fill_diagonal(distances, np.inf)
        neighbours = max(count - self._malicious - 2, 1)
        scores = np.sort(distances, axis=1)[:, :neighbours].sum(axis=1)
        places: list[int] = np.argsort(scores, kind="stable")[: self._keep].tolist()
        return places

    def combine(self, rows: Rows) -> Vector:
        mean: Vector = rows.mean(axis=0, dtype=np.float32)
        return mean
