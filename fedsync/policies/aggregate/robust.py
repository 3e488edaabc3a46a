"""Aggregations that resist a few silos' wrong updates; they compare single updates, which must be unencrypted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from annotated_types import Ge, Lt

from fedsync.core.orders import UpdateMeta
from fedsync.core.protocols import Weigher
from fedsync.core.silo_weight import Solver
from fedsync.model.commit_updates import Combiner
from fedsync.model.robust_combiners import KrumCombiner, MedianCombiner, TrimmedMeanCombiner
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
