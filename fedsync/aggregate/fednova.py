"""FedNova: silos that do more local steps do not steer the model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from fedsync.core.orders import UpdateMeta
from fedsync.core.protocols import Weigher


@dataclass(frozen=True, slots=True)
class FedNova:
    """Normalise each update by its local progress before averaging: c_i = p_i tau_eff / |a_i|.

    An update is ``-eta sum_k a_ik g_ik``, where a_ik is how much the gradient of step k came to count; its L1
    norm |a_i| grows with the steps, see `progress`. A plain mean of updates therefore minimises an objective in
    which a silo counts p_i |a_i|, not p_i. Divided by |a_i| an update is a mean gradient; the server walks
    tau_eff = sum_i p_i |a_i| steps along the mean of those, as far as the plain mean would have gone. With
    equal steps c_i = p_i.

    Args:
        inner: gives p_i, which sum to 1.
        momentum: rho of the silos' SGD.
        pull: eta mu: learning rate times strength of the proximal term.

    Source: Wang et al. 2020, arXiv:2007.07481.
    """

    inner: Weigher
    momentum: float = 0.0
    pull: float = 0.0

    @property
    def linear(self) -> bool:
        """As ``inner``: a silo knows its |a_i|, and tau_eff is common to the commit."""
        return self.inner.linear

    @property
    def toward(self) -> bool:
        """As ``inner``."""
        return self.inner.toward

    def coefficients(self, metas: Sequence[UpdateMeta], version: int) -> Sequence[float]:
        """c_i = p_i tau_eff / |a_i|."""
        shares = self.inner.coefficients(metas, version)
        norms = [progress(meta.steps, self.momentum, self.pull) for meta in metas]
        effective = sum(share * norm for share, norm in zip(shares, norms, strict=True))
        return [share * effective / norm for share, norm in zip(shares, norms, strict=True)]


@lru_cache(maxsize=4096)
def progress(steps: int, momentum: float, pull: float) -> float:
    """|a|_1: how far ``steps`` local steps lead along a constant gradient of 1, in units of eta.

    - SGD: ``tau``.
    - With momentum rho: ``(tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho)``.
    - With a proximal term, alpha = eta mu: ``(1 - (1 - alpha)^tau) / alpha``.
    - With both there is no short formula, so the steps are walked.

    Args:
        steps: tau, at least 1.
        momentum: rho, 0 <= rho < 1.
        pull: alpha = eta mu, 0 <= alpha < 1, so that no a_k is negative without momentum.

    Source: arXiv:2007.07481, the vectors a_i of the local solvers.
    """
    if pull == 0:
        return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
    if momentum == 0:
        return -math.expm1(steps * math.log1p(-pull)) / pull  # as above, and exact for a weak pull
    way = speed = 0.0
    for _ in range(steps):
        speed = momentum * speed + 1 - pull * way
        way += speed
    return way
