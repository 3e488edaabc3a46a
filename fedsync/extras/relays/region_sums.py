"""Sums of regions: payloads that a relay sends to the server instead of its silos' single updates.

A *region* is the group of silos behind one relay. The relay checks each update as the server would, adds compatible
updates, and sends the sum with the names of its members. The relative weight of an update within its region (`share`)
is known before any commit. So the server multiplies the whole sum by the members' common factor. A sum is committed
whole or not at all: if one member's update does not count, no member's update counts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from fedsync.core.orders import WorkReport
from fedsync.core.silo_weight import Weighting
from fedsync.model.transfer import Payload


@dataclass(frozen=True, slots=True, eq=False)
class RegionSum:
    """Sum of the updates ``update_ids`` (in order, unique); of a single member, the update as received."""

    update_ids: tuple[str, ...]
    payload: Payload


class RegionAdder(Protocol):
    """Adder of a region's updates, at its relay."""

    @property
    def upload_bytes(self) -> int:
        """Encoded size of a silo's update."""

    def put(self, silo: str, update_id: str, base: int, share: float, update: Payload) -> None:
        """Check an update as the server would, and store it; raises `ProtocolError` if it is invalid.

        ``base`` is the version that the order started from; ``share``, positive, weighs the update within the region.
        """

    def discard(self, update_id: str) -> None:
        """Drop an update; no error if it is absent."""

    def sums(self, update_ids: Collection[str]) -> Sequence[RegionSum]:
        """Return the sums of these updates and drop the updates. Compatible updates are in one sum."""


def share_of(weighting: Weighting, examples: int, report: WorkReport) -> float:
    """Weight of an update relative to others of one base: w_i / a_i of `fedsync.core.silo_weight`."""
    return weighting.weight(examples, report.samples, report.precision) / weighting.progress(report.steps)
