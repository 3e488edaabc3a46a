"""FedAvg, FedBuff and FedAsync, each a composition of `weighers`; FedNova has its own file."""

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
    """Weight of an update: ``silo`` weighs all updates equally, ``examples`` by the samples that its silo holds,
    ``samples`` by the samples processed for it, ``precision`` by samples held and, in private runs, little noise."""

    staleness: Staleness = field(default_factory=Constant)

    def weigher(self, solver: Solver) -> Weigher:
        return self._discounted(WeightedMean(self.weight), rate=1.0)


@register("fedbuff")
@dataclass(frozen=True, slots=True)
class FedBuff(DiscountedPolicy):
    """Mean of the updates, each discounted by its staleness, times ``server_rate``."""

    server_rate: Positive = 1.0
    """Learning rate of the server: factor of the commit's step; eta_g in the paper."""

    staleness: Staleness = field(default_factory=Polynomial)

    def weigher(self, solver: Solver) -> Weigher:
        return self._discounted(WeightedMean("silo"), self.server_rate)


@register("fedasync")
@dataclass(frozen=True, slots=True)
class FedAsync(DiscountedPolicy):
    """Mixture of the current model and the silo's whole model."""

    mixing: Share = 0.6
    """Share of a fresh silo model in the mixture; alpha in the paper."""

    staleness: Staleness = field(default_factory=Polynomial)

    additive = False

    def weigher(self, solver: Solver) -> Weigher:
        return Toward(self._discounted(WeightedMean("silo"), self.mixing))
