"""FedAvg, FedBuff, FedAsync and FedNova, each a composition of `weighers`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fedsync.core import silo_weight
from fedsync.core.orders import UpdateMeta
from fedsync.core.protocols import Weigher
from fedsync.core.silo_weight import Solver, Weighting, progress
from fedsync.policies.aggregate.weighers import Constant, DiscountedPolicy, Polynomial, Staleness, Toward, WeightedMean
from fedsync.policies.schema import Positive, Share, register


@dataclass(frozen=True, slots=True)
class Normalised:
    """Weigher that divides each update by its local progress before averaging: c_i = p_i tau_eff / |a_i|.

    An update is ``-eta sum_k a_ik g_ik``, where a_ik is the final weight of the gradient of step k. Its L1 norm |a_i|
    (`progress`) grows with the steps, so a plain mean of updates minimises an objective in which silo i counts p_i
    |a_i|, not p_i. Divided by |a_i|, an update is a mean gradient. The server walks tau_eff = sum_i p_i |a_i| steps
    along the mean of these gradients, as far as the plain mean would have gone.

    Args:
        inner: gives p_i, which sum to 1.
        momentum, pull: rho and eta mu of the silos; see `Solver`.

    Source: Wang et al. 2020, arXiv:2007.07481.
    """

    inner: Weigher
    momentum: float = 0.0
    pull: float = 0.0

    @property
    def weighting(self) -> Weighting | None:
        inner = self.inner.weighting
        return None if inner is None else replace(inner, normalised=True, momentum=self.momentum, pull=self.pull)

    @property
    def toward(self) -> bool:
        return self.inner.toward

    def coefficients(self, metas: Sequence[UpdateMeta], version: int) -> Sequence[float]:
        shares = self.inner.coefficients(metas, version)
        norms = [progress(meta.steps, self.momentum, self.pull) for meta in metas]
        effective = sum(share * norm for share, norm in zip(shares, norms, strict=True))
        return [share * effective / norm for share, norm in zip(shares, norms, strict=True)]


@register("fednova")
@dataclass(frozen=True, slots=True)
class FedNova(DiscountedPolicy):
    """Weighted mean of the updates, each divided by its silo's progress, for unequal numbers of steps."""

    weight: silo_weight.Share = "examples"
    """Weight of an update: ``silo`` weighs all updates equally, ``examples`` by the samples that its silo holds,
    ``samples`` by the samples processed for it, ``precision`` by samples held and, in private runs, little noise."""

    server_rate: Positive = 1.0
    """Learning rate of the server: factor of the commit's step."""

    staleness: Staleness = field(default_factory=Constant)

    normalises = True

    def weigher(self, solver: Solver) -> Weigher:
        mean = Normalised(WeightedMean(self.weight), solver.momentum, solver.pull)
        return self._discounted(mean, self.server_rate)


@register("fedavg")
@dataclass(frozen=True, slots=True)
class FedAvg(DiscountedPolicy):
    """Weighted mean of the updates."""

    weight: silo_weight.Share = "examples"
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
