"""How much each update counts in a commit."""

from __future__ import annotations

from dataclasses import dataclass

from fedsync.core.orders import UpdateMeta


@dataclass(frozen=True, slots=True)
class BySilo:
    """Every silo counts the same: the choice for balanced batches on data that differ between silos.

    Source: LB-BSP, section 3.5: each local data set, not each sample, is to be treated equally.
    """

    linear: bool = True

    def weight(self, meta: UpdateMeta, version: int) -> float:
        """Always 1."""
        return 1.0


@dataclass(frozen=True, slots=True)
class ByExamples:
    """A silo counts as much as it holds training samples: FedAvg as published."""

    linear: bool = True

    def weight(self, meta: UpdateMeta, version: int) -> float:
        """Training samples of the silo."""
        return float(meta.examples)


@dataclass(frozen=True, slots=True)
class BySamples:
    """A silo counts as much as it processed: weighted gradient aggregation, for i.i.d. data.

    Source: LB-BSP, section 3.4, equation 7.
    """

    linear: bool = True

    def weight(self, meta: UpdateMeta, version: int) -> float:
        """Samples processed for this update."""
        return float(meta.samples)
