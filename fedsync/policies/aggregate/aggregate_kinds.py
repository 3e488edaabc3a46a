"""FedAvg, FedBuff and FedAsync: each a composition of `weighers`. FedNova has a file of its own."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedsync.core import weighting
from fedsync.core.protocols import Weigher
from fedsync.core.weighting import Solver
from fedsync.policies.aggregate.aggregate_base import DiscountedPolicy, Staleness
from fedsync.policies.aggregate.staleness import Constant, Polynomial
from fedsync.policies.aggregate.weighers import Toward, WeightedMean
from fedsync.policies.schema import Positive, Share, register


@register("fedavg")
@dataclass(frozen=True, slots=True)
class FedAvg(DiscountedPolicy):
    """Weighted mean of the updates."""

    weight: weighting.Share = "examples"
    """What an update counts by: ``silo`` all the same, ``examples`` by the samples its silo holds, ``samples`` by those
    processed."""

    staleness: Staleness = field(default_factory=Constant)

    def weigher(self, solver: Solver) -> Weigher:
        return self._discounted(WeightedMean(self.weight), rate=1.0)


@register("fedbuff")
@dataclass(frozen=True, slots=True)
class FedBuff(DiscountedPolicy):
    """``server_rate`` times the mean of the updates, each discounted by its staleness."""

    server_rate: Positive = 1.0
    """The commit's step is multiplied by it; eta_g in the paper."""

    staleness: Staleness = field(default_factory=Polynomial)

    def weigher(self, solver: Solver) -> Weigher:
        return self._discounted(WeightedMean("silo"), self.server_rate)


@register("fedasync")
@dataclass(frozen=True, slots=True)
class FedAsync(DiscountedPolicy):
    """The model becomes a mixture of itself and the silo's whole model."""

    mixing: Share = 0.6
    """Share of the silo's model in the mixture, where it is fresh; alpha in the paper."""

    staleness: Staleness = field(default_factory=Polynomial)

    additive = False

    def weigher(self, solver: Solver) -> Weigher:
        return Toward(self._discounted(WeightedMean("silo"), self.mixing))
