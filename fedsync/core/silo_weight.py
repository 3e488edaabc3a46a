"""Part of an update's weight that the silo itself computes, because the server cannot read encrypted updates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

Share = Literal["silo", "examples", "samples", "precision"]

PRECISION_UNIT = 2**20
"""Weight by precision of a sample whose gradients have no noise; large, as noise on many values leaves little of it."""


@dataclass(frozen=True, slots=True)
class Solver:
    """Local solver of a silo, for `progress`. ``momentum`` is rho of SGD. ``pull`` is the share of the distance from
    the start that each step takes back: eta mu of a proximal term, or the rate of a running mean.
    """

    momentum: float = 0.0
    pull: float = 0.0


@dataclass(frozen=True, slots=True)
class Weighting:
    """Weights of a commit, split into the silos' own factors and a factor common to the commit.

    With the weight w_i of silo i and its local progress a_i (1 unless ``normalised``), a commit adds ``rate x (sum_i
    w_i a_i / sum_i w_i) x sum_i (w_i update_i / a_i) / sum_i w_i``. These are three sums over silos, so a server that
    can only add can compute the commit.

    Args:
        by: w_i: 1, training samples held, samples processed, or precision, which the silo computes from the samples
            held and its privacy noise.
        rate: server's learning rate.
        normalised: divide updates by local progress (FedNova).
        momentum, pull: rho and alpha of the silos' solver; see `progress`.
    """

    by: Share = "silo"
    rate: float = 1.0
    normalised: bool = False
    momentum: float = 0.0
    pull: float = 0.0

    def weight(self, examples: int, samples: int, precision: int | None = None) -> int:
        return {
            "silo": 1,
            "examples": examples,
            "samples": samples,
            "precision": precision or PRECISION_UNIT * examples,
        }[self.by]

    def progress(self, steps: int) -> float:
        return progress(steps, self.momentum, self.pull) if self.normalised else 1.0


@lru_cache(maxsize=4096)
def progress(steps: int, momentum: float, pull: float) -> float:
    """|a|_1: distance covered by tau = ``steps`` local steps along a constant gradient of 1, in units of eta.

    Needs tau >= 1, 0 <= rho < 1, and 0 <= alpha <= 1: then no a_k is negative without momentum.
    - SGD: ``tau``.
    - With momentum rho: ``(tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho)``.
    - With a proximal term, alpha = eta mu = ``pull``: ``(1 - (1 - alpha)^tau) / alpha``.
    - With both there is no short formula; the result is an entry of a matrix power.

    Source: arXiv:2007.07481, the vectors a_i of the local solvers.
    """
    if pull == 0:
        return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
    if momentum == 0:
        if pull == 1:
            return 1.0  # each step starts from the initial model
        return -math.expm1(steps * math.log1p(-pull)) / pull  # the formula above, accurate for a weak pull too
    # One step: speed' = rho speed + 1 - alpha way, and way' = way + speed'. Squaring bounds the cost of a huge claim.
    step = np.array([[1 - pull, momentum, 1], [-pull, momentum, 1], [0, 0, 1]])
    return float(np.linalg.matrix_power(step, steps)[0, 2])
