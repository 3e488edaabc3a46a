"""Control variates (SCAFFOLD): corrections of local steps by the difference between a silo's and the mean gradient.

In SCAFFOLD silo i has a variate c_i, the mean gradient of its last update. All silos have c, the mean of all c_i. A
local step goes along ``gradient - c_i + c``. After K steps from x to y_i, option II of the paper sets
``c_i+ = c_i - c + (x - y_i) / (K eta)``. This module stores both variates as the model change of one local step,
``m = -eta c``. With update u_i = y_i - x:

| where | formula | when |
|---|---|---|
| silo | gradient ``+= (m_i - m) / eta`` | before each local step |
| silo | ``m_i+ = m_i - m + u_i / K_i`` | once u_i is in a commit; see `fedsync.silo.session.own_variate` |
| server | ``m = sum n_i m_i / sum n_i``, over all silos that were in a commit | at each commit |

The new m follows from the sum of updates: in ``m_i+ - m_i = u_i / K_i - m`` the silo's own variate cancels. For a
commit of S silos with total weight W, and T and T+, the total weight of all silos before and after:

    m+ = ((T - W) m + W g) / T+        g = sum of n_i u_i / K_i over S, over W

- The change of a commit is ``sum w_i u_i``. If the weigher divides by steps (FedNova), w_i is R n_i / K_i for one R, so
  g is the change over ``sum w_i K_i``. With equal steps this holds for FedAvg.
- It suffices that m = sum kappa n_i m_i for any constant kappa, so T need not be exact; with sealed figures, T is
  unknown. T grows by the mean weight of a commit's updates for each new silo, and to at least W.
- The sum of kappa n_i m_i must be exact. So m_i+ counts only with its committed update, as it arrives after rounding,
  and all updates of a commit start from the newest version. An absent silo keeps its part of m.

Without encryption, m is sent with the model (`ControlledModel`): the model and m, float32. Then follow 16 bytes a silo:
the first 8 bytes of SHA-256 of its name, and the serial number of its last committed update, int64. The number tells a
silo to which update its own variate belongs. All silos get the same bytes.

Source: Karimireddy et al. 2020, arXiv:1910.06378, algorithm 1, option II.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from fedsync.common.errors import SERVER
from fedsync.model.chunked_arrays import ArrayKeeper
from fedsync.model.layout import Vector
from fedsync.model.plain_wire import FP32, check_length, check_values
from fedsync.model.server_optimizer import LARGEST, Backing, Moments, Part, ServerOptimizer
from fedsync.model.transfer import Payload


@dataclass(frozen=True, slots=True)
class ControlVariates(ServerOptimizer):
    """Server step ``model += rate change`` that also maintains m, with T in place of `Moments.powers`; see the module.

    ``rate`` is eta_g in the paper; ``kept`` and ``gained`` are the weights of the old m and of the change in the
    current step; ``grace`` is None, since no update is stale.
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
        self, before: Moments, change: Vector, stale: Sequence[int], keeper: ArrayKeeper, backing: Backing | None = None
    ) -> tuple[Moments, Part] | None:
        if backing is None:  # no update counts
            return None
        (total,) = before.powers
        weight = backing.weight
        following = min(max(total + weight * backing.newcomers / backing.updates, weight), LARGEST)
        step = replace(self, kept=(total - weight) / following, gained=weight / (following * backing.steps))
        advanced = ServerOptimizer.advance(step, replace(before, powers=()), change, stale, keeper)
        return None if advanced is None else (replace(advanced[0], powers=(following,)), advanced[1])

    def _comes_to(self, powers: tuple[float, ...]) -> bool:
        return len(powers) == 1 and 0 <= powers[0] <= LARGEST

    def _moment(self, which: int, old: Sequence[Vector], change: Vector) -> Vector:
        made = old[0] * np.float32(self.kept)
        made += change * np.float32(self.gained)
        return made

    def _step(self, moments: Sequence[Vector], change: Vector) -> Vector:
        return change.copy()


_COUNTED = np.dtype([("silo", "S8"), ("serial", "<i8")])


@dataclass(frozen=True, slots=True, eq=False)
class ControlledModel:
    """Model with the control variate m that corrects local steps, float32 [values] each. ``counted`` has the serial
    number of each silo's last committed update, by `key_of` its name.
    """

    model: Vector
    control: Vector
    counted: Mapping[bytes, int]

    def encode(self, keeper: ArrayKeeper) -> Payload:
        table = np.array(sorted(self.counted.items()), _COUNTED)
        return keeper.join([self.model, self.control, table.view(np.uint8)])

    @classmethod
    def decode(cls, payload: Payload, values: int) -> ControlledModel:
        """Read the server's bytes; arrays are views. Raise `ProtocolError` if the length is wrong, or a control value
        is not finite or too large.
        """
        length = 8 * values
        check_length(payload, length + max(payload.nbytes - length, 0) // _COUNTED.itemsize * _COUNTED.itemsize, SERVER)
        model, control = payload[: 4 * values].view(np.float32), payload[4 * values : length].view(np.float32)
        check_values(FP32, values, SERVER, control)
        table = np.frombuffer(payload[length:].tobytes(), _COUNTED)
        return cls(model, control, {bytes(row["silo"]).ljust(8, b"\0"): int(row["serial"]) for row in table})


def key_of(silo: str) -> bytes:
    return hashlib.sha256(silo.encode()).digest()[:8]


def backed(
    counted: Mapping[str, int], update_ids: Collection[str], steps: float, weight: float
) -> tuple[dict[str, int], Backing]:
    """Return the silos' last committed serials after a commit, ``counted`` before it, and the commit's backing."""
    after = {**counted, **dict(map(serial_of, update_ids))}
    return after, Backing(steps, weight, len(update_ids), len(after) - len(counted))


def serial_of(update_id: str) -> tuple[str, int]:
    """Return silo and serial number of an update; raise ValueError if the id has no number."""
    silo, _, serial = update_id.rpartition("/")
    return silo, int(serial)
