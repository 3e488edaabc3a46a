"""Pooled sums of several silos: the same bits in any order of additions and removals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fedsync.evaluation.metrics.metric_types import AnyMetric, ExactSum, Statistic, Sums, number


@dataclass(slots=True)
class SumsPool:
    """Sums by key, from which single contributions can be removed. Counts are integers; others are added exactly."""

    counts: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    others: dict[str, list[ExactSum]] = field(default_factory=dict)

    def add(self, sums: Mapping[str, Sequence[float]], known: Mapping[str, Statistic], times: int = 1) -> None:
        """Add checked sums by key, or remove them with ``times=-1``; unknown statistics are ignored."""
        for key, values in sums.items():
            statistic = known.get(key)
            if statistic is None:
                continue
            if statistic.whole:
                before = self.counts.get(key)
                counts = np.array(values, np.float64).astype(np.int64) * times
                self.counts[key] = counts if before is None else before + counts
            else:
                exact = self.others.setdefault(key, [])
                exact.extend(ExactSum() for _ in range(statistic.size - len(exact)))
                for total, value in zip(exact, values, strict=True):
                    total.add(value, times)

    def sums(self, key: str) -> Sums | None:
        """Return the sums of one statistic, float64 [size]; None if nobody measured it."""
        if key in self.counts:
            return self.counts[key].astype(np.float64)
        return np.array([total.value for total in self.others[key]]) if key in self.others else None

    def numbers(self, metrics: Iterable[AnyMetric]) -> dict[str, float]:
        found: dict[str, float] = {}
        for metric in metrics:
            sums = self.sums(metric.statistic.key)
            value = None if sums is None else number(metric, sums)
            if value is not None:
                found[metric.name] = value
        return found
