"""Batch sizes with which private silos run out of their privacy budgets at about the same time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import log, sqrt
from statistics import fmean
from typing import Annotated

import numpy as np
from annotated_types import Gt, Le, Lt
from numpy.typing import NDArray

from fedsync.core.orders import LocalWork
from fedsync.core.protocols import Bounds, RoundSeen
from fedsync.core.speed.curve import Curve
from fedsync.core.speed.sizing import Sizing
from fedsync.policies.balance.balancer_base import SharingBalancer
from fedsync.policies.balance.by_forecast import ProportionalBalancer
from fedsync.policies.balance.whole import in_multiples
from fedsync.policies.schema import register

Epsilon = Annotated[float, Gt(0), Le(100)]
Delta = Annotated[float, Gt(0), Lt(1)]


@register("spend-evenly")
@dataclass(frozen=True, slots=True)
class SpendEvenly(SharingBalancer):
    """Batch sizes in proportion to a silo's rows and to what its privacy budget has room for; speeds do not count.

    For private runs with a ``noise_multiplier``. A step of a batch B on N rows has the sampling rate q = B / N, and
    costs about q² in zero-concentrated differential privacy. There, an epsilon has room for ``(sqrt(L + epsilon) -
    sqrt(L))²`` with ``L = log(1 / delta)``. So budgets end together if q is in proportion to the root of that room.

    With noise multipliers below about 1.5 and high rates, q² is too little, and large budgets end first.

    A barrier that ends orders early, or silos of unequal steps, make budgets end at different rounds again.

    The server knows of budgets only what the strategy says. It sees no ledger, so what other runs have spent does not
    count unless the numbers given here leave it out; each silo's own ledger decides.

    Source: Bun and Steinke 2016 (arXiv:1605.02065), proposition 1.3; for sampling, Mironov et al. 2019
    (arXiv:1908.10530), whose divergence grows with q² to leading order.
    """

    budgets: dict[str, Epsilon] = field(default_factory=dict)
    """Epsilon that each silo's owner has declared for the run, by the silo's name. Silos that are left out count as the
    largest of these; without any budget, all silos have equal sampling rates."""

    delta: Delta = 1e-5
    """Probability that belongs to the budgets."""

    symmetric = False  # budgets are of silos by name
    spends = True

    @property
    def named(self) -> Mapping[str, float]:
        return self.budgets

    def sizing(self, work: LocalWork) -> Sizing:
        return Sizing(work, floor=self.floor, cap=self.cap, adaptive=self)

    def init(self) -> Mapping[str, int]:
        return {}

    def advance(self, state: Mapping[str, int], seen: RoundSeen) -> tuple[Mapping[str, int], tuple[str, ...]]:
        return dict(seen.examples), ()

    def plan(self, state: Mapping[str, int], names: Sequence[str], total: int, bounds: Bounds) -> NDArray[np.int64]:
        usual = fmean(state.values()) if state else 1.0
        most = max(self.budgets.values(), default=1.0)
        weights = [max(state.get(name, usual), 1.0) * self._room(self.budgets.get(name, most)) for name in names]
        curves = [Curve(weight) for weight in weights]
        share = ProportionalBalancer(rounding="largest-remainder").plan
        return in_multiples(self.multiple, total, bounds, lambda count, units: share(curves, count, units))

    def _room(self, epsilon: float) -> float:
        """Root of the room that an epsilon has in zero-concentrated differential privacy."""
        least = log(1.0 / self.delta)
        return sqrt(least + epsilon) - sqrt(least)
