"""Control variates: each local step is corrected by how the gradients of its silo's data differ from all (SCAFFOLD).

A silo whose data are unlike the others' drifts: its local steps lead to the best model for its own data, and the mean
of such models is not the best for all. SCAFFOLD gives silo i a variate c_i, its mean gradient in its last update, and
all of them c, the mean of these. A local step goes along ``gradient - c_i + c``. After K steps from x to y_i, option II
of the paper renews ``c_i+ = c_i - c + (x - y_i) / (K eta)``, which is the mean gradient on the way.

Here both are kept as what they make the model move by in a local step, ``m = -eta c``: so the learning rate, one for
all silos and rounds, comes in only where a gradient is corrected. With update u_i = y_i - x:

| who | what | when |
|---|---|---|
| silo | gradient ``+= (m_i - m) / eta`` | before each local step |
| silo | ``m_i+ = m_i - m + u_i / K_i`` | once u_i is in a commit; see `fedsync.silo.session.own_variate` |
| all | ``m = sum n_i m_i / sum n_i``, over the silos that were in a commit so far | at each commit |

What m becomes follows from the sum of updates that travels anyway, for in ``m_i+ - m_i = u_i / K_i - m`` the silo's own
variate cancels. With the commit's S silos, of weight W together, and T, the silos' weight so far and now:

    m+ = ((T - W) m + W g) / T+        g = sum of n_i u_i / K_i over S, over W

- The change of a commit is ``sum w_i u_i``. Where the weigher divides by steps (FedNova), w_i is R n_i / K_i for one R,
  so g is the change over ``sum w_i K_i``: over the local steps that it is worth. With equal steps that is FedAvg.
- m = sum kappa n_i m_i is all that is needed, for any constant kappa: where the model rests, m is 0, and so is the sum
  of all gradients, weighted. So T need not be exact, which nobody knows where figures are sealed: it grows by the mean
  weight of a commit's updates for each silo that is new, and to W where that is more.
- That sum has to be exact, for nothing ever mends it. So m_i+ counts only with the update that was committed, it is
  made of the update as it arrives, after rounding, and all updates of a commit began with the newest version.
- A silo that stays away keeps its part of m.

Source: Karimireddy et al. 2020, arXiv:1910.06378, algorithm 1, option II.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from fedsync.model.array_keeper import ArrayKeeper
from fedsync.model.layout import Vector
from fedsync.model.server_optimizer import LARGEST, Backing, Moments, Part, ServerOptimizer


@dataclass(frozen=True, slots=True)
class ControlVariates(ServerOptimizer):
    """``model += rate change``, beside which it keeps m; in the place of powers it has T. See the module.

    Args:
        rate: the server's learning rate, eta_g in the paper.
        kept: what m counts in the step that is made.
        gained: what the change counts in it.
        grace: no update is stale.
    """

    rate: float
    kept: float = 0.0
    gained: float = 0.0
    grace: int | None = None

    vectors: ClassVar[int] = 1
    controls: ClassVar[bool] = True

    def begin(self, values: int, keeper: ArrayKeeper) -> Moments:
        return replace(ServerOptimizer.begin(self, values, keeper), powers=(0.0,))

    def advance(
        self, before: Moments, change: Vector, pace: float, keeper: ArrayKeeper, backing: Backing | None = None
    ) -> tuple[Moments, Part] | None:
        if backing is None:  # no update counts
            return None
        (total,) = before.powers
        weight = backing.weight
        following = min(max(total + weight * backing.newcomers / backing.updates, weight), LARGEST)
        step = replace(self, kept=(total - weight) / following, gained=weight / (following * backing.steps))
        advanced = ServerOptimizer.advance(step, replace(before, powers=()), change, pace, keeper)
        return None if advanced is None else (replace(advanced[0], powers=(following,)), advanced[1])

    def _comes_to(self, powers: tuple[float, ...]) -> bool:
        return len(powers) == 1 and 0 <= powers[0] <= LARGEST

    def _moment(self, which: int, old: Sequence[Vector], change: Vector, steps: int) -> Vector:
        made = old[0] * np.float32(self.kept)
        made += change * np.float32(self.gained)
        return made

    def _step(self, moments: Sequence[Vector], change: Vector, steps: int) -> Vector:
        return change.copy()
