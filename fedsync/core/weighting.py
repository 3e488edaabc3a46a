"""The part of an update's weight that its silo knows: what makes aggregation possible where nobody sees an update."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

Share = Literal["silo", "examples", "samples"]


@dataclass(frozen=True, slots=True)
class Solver:
    """What becomes of a constant gradient over a silo's local steps, for `progress`.

    Args:
        momentum: rho of its SGD.
        pull: share of the way back to where it started that each step goes: eta mu of a proximal term; for a task whose
            model is a running mean, its rate.
    """

    momentum: float = 0.0
    pull: float = 0.0


@dataclass(frozen=True, slots=True)
class Weighting:
    """How a commit weighs its updates, split into what silos know and what is common to the commit.

    With w_i what silo i stands for and a_i its local progress (1 unless ``normalised``), a commit adds
    ``rate x (sum_i w_i a_i / sum_i w_i) x sum_i (w_i update_i / a_i) / sum_i w_i``. Three sums over silos,
    so a server that can only add can do it.

    Args:
        by: what an update stands for: every silo the same, the training samples that it holds, or the samples
            that it processed.
        rate: the server's learning rate.
        normalised: divide updates by local progress: FedNova.
        momentum: rho of the silos' SGD, for `progress`.
        pull: eta mu, for `progress`.
    """

    by: Share = "silo"
    rate: float = 1.0
    normalised: bool = False
    momentum: float = 0.0
    pull: float = 0.0

    def weight(self, examples: int, samples: int) -> int:
        """w_i of a silo that holds ``examples`` and processed ``samples``."""
        return {"silo": 1, "examples": examples, "samples": samples}[self.by]

    def progress(self, steps: int) -> float:
        """a_i after so many local steps."""
        return progress(steps, self.momentum, self.pull) if self.normalised else 1.0


@lru_cache(maxsize=4096)
def progress(steps: int, momentum: float, pull: float) -> float:
    """|a|_1: how far ``steps`` local steps lead along a constant gradient of 1, in units of eta.

    - SGD: ``tau``.
    - With momentum rho: ``(tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho)``.
    - With a proximal term, alpha = eta mu: ``(1 - (1 - alpha)^tau) / alpha``.
    - With both there is no short formula, but a power of a matrix.

    Args:
        steps: tau, at least 1.
        momentum: rho, 0 <= rho < 1.
        pull: alpha = eta mu, 0 <= alpha <= 1, so that no a_k is negative without momentum.

    Source: arXiv:2007.07481, the vectors a_i of the local solvers.
    """
    if pull == 0:
        return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
    if momentum == 0:
        if pull == 1:
            return 1.0  # each step begins anew
        return -math.expm1(steps * math.log1p(-pull)) / pull  # as above, and exact for a weak pull
    # One step: speed' = rho speed + 1 - alpha way, and way' = way + speed'. By squaring: a silo may claim any number.
    step = np.array([[1 - pull, momentum, 1], [-pull, momentum, 1], [0, 0, 1]])
    return float(np.linalg.matrix_power(step, steps)[0, 2])
