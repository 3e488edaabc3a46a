"""Median, trimmed mean and Krum: aggregations that resist a few silos' wrong updates, which must be unencrypted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Ge, Lt

from fedsync.core.orders import UpdateMeta
from fedsync.core.protocols import Weigher
from fedsync.core.silo_weight import Solver
from fedsync.model.chunked_arrays import spans
from fedsync.model.commit_updates import Combiner, CommitUpdates, Rows
from fedsync.model.layout import Vector
from fedsync.model.running_statistics import within
from fedsync.policies.aggregate.aggregate_kinds import FedAvg
from fedsync.policies.aggregate.weighers import AggregationPolicy
from fedsync.policies.schema import Chosen, Count, PositiveInt, register

InnerAggregation = Annotated[AggregationPolicy, Chosen("aggregation")]


def _equal() -> AggregationPolicy:
    return FedAvg("silo")


@dataclass(frozen=True, slots=True)
class _Looked:
    """Coefficients of ``inner``; silos cannot apply them, because the updates are not added."""

    inner: Weigher
    weighting: ClassVar[None] = None
    toward: ClassVar[bool] = False

    def coefficients(self, metas: Sequence[UpdateMeta], version: int) -> Sequence[float]:
        return self.inner.coefficients(metas, version)


class RobustPolicy(AggregationPolicy):
    """Base of aggregations that do not add up updates."""

    inner: InnerAggregation
    """Aggregation that gives updates their coefficients before the comparison. Default: equal coefficients."""

    additive = False

    def __post_init__(self) -> None:
        if self.inner.combiner() is not None or self.inner.weigher(Solver()).toward:
            raise ValueError(f"inner.kind {self.inner.kind!r} gives no coefficients; choose fedavg, fednova or fedbuff")

    @property
    def normalises(self) -> bool:
        return self.inner.normalises

    @property
    def discounts(self) -> bool:
        return self.inner.discounts

    def weigher(self, solver: Solver) -> Weigher:
        return _Looked(self.inner.weigher(solver))


@register("median")
@dataclass(frozen=True, slots=True)
class Median(RobustPolicy):
    """Median of the updates, value by value; correct while fewer than half of the updates are wrong.

    Source: Yin et al. 2018, "Byzantine-robust distributed learning", arXiv:1803.01498, definition 1.
    """

    inner: InnerAggregation = field(default_factory=_equal)

    def combiner(self) -> Combiner:
        return MedianCombiner()


@register("trimmed-mean")
@dataclass(frozen=True, slots=True)
class TrimmedMean(RobustPolicy):
    """Mean of the updates, value by value, without the largest and smallest values.

    Source: Yin et al. 2018, arXiv:1803.01498, definition 2.
    """

    share: Annotated[float, Ge(0), Lt(0.5)] = 0.2
    """Share of the updates left out at each end, rounded down, but at least one update if a commit has three."""

    inner: InnerAggregation = field(default_factory=_equal)

    def combiner(self) -> Combiner:
        return TrimmedMeanCombiner(self.share)


@register("krum")
@dataclass(frozen=True, slots=True)
class Krum(RobustPolicy):
    """Mean of the ``keep`` updates that are nearest to their neighbours: Krum with ``keep: 1``, else multi-Krum.

    A commit needs at least 2 ``malicious`` + 3 updates, and at least ``keep`` + ``malicious``.

    Source: Blanchard et al. 2017, "Machine learning with adversaries", arXiv:1703.02757, section 4.
    """

    malicious: Count = 1
    """Number of silos that may send arbitrary updates; f in the paper."""

    keep: PositiveInt = 1
    """Number of updates that are averaged; m in the paper."""

    inner: InnerAggregation = field(default_factory=_equal)

    def combiner(self) -> Combiner:
        return KrumCombiner(self.malicious, self.keep, max(2 * self.malicious + 3, self.keep + self.malicious))


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
