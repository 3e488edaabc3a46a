"""Releases under differential privacy: dataclasses of the noise mechanism and of DP-SGD settings at one silo."""

from __future__ import annotations

from dataclasses import dataclass

from fedsync.core.silo_weight import PRECISION_UNIT


@dataclass(frozen=True, slots=True, order=True)
class Release:
    """Subsampled Gaussian mechanism: each unit, an example or a person, takes part with probability ``rate``, above 0
    and at most 1, and Gaussian noise is added. ``noise``, above 0, is the noise multiplier: the standard deviation of
    the noise, divided by the largest contribution of a unit. Two data sets are neighbours if one has one unit more.
    """

    rate: float
    noise: float


@dataclass(frozen=True, slots=True)
class PrivateSettings:
    """Settings of DP-SGD at one silo.

    Args:
        clip: largest norm of a unit's gradient in a step.
        noise: noise multiplier: standard deviation of the noise, divided by ``clip``. No step is possible while it is
            None.
        units: public number of units. A batch of B samples means the sampling rate B / ``units``.
        person_column: column of the silo's table that names the person of a row; empty where an example is a unit.
        seeded: noise and sampling come from the order's seed, which only virtual time may do.
        scores: scores are public, so evaluations report losses and metrics, not only correct predictions.
    """

    clip: float
    noise: float | None
    units: int
    person_column: str = ""
    seeded: bool = False
    scores: bool = False

    def rate(self, batch_size: int) -> float:
        return min(1.0, batch_size / self.units)

    def precision(self, batch_size: int, values: int) -> int:
        """Weight of an update by its precision: 2^20 times the units, times the share of its variance that is no noise.

        A mean of B gradients of norm C at most has a variance of up to C^2 / B, and noise on d = ``values`` trained
        values adds d (z C / B)^2. The share therefore is 1 / (1 + d z^2 / B): without noise, an update weighs by its
        units alone.
        """
        assert self.noise is not None
        return max(round(PRECISION_UNIT * self.units / (1 + values * self.noise**2 / batch_size)), 1)

    def release(self, batch_size: int) -> Release:
        """Release of one step of ``batch_size`` samples; `noise` must be chosen."""
        assert self.noise is not None
        return Release(self.rate(batch_size), self.noise)
