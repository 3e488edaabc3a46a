"""Sums of regions: what a relay sends on in the place of its silos' updates.

A *region* is the silos behind one relay. The relay checks each update as the server would, adds those that may be added
up, and sends the sum with its members named. What a silo's update counts among the others of its region is known
before any commit (`share`): so the server multiplies the whole sum by what its members count together. A sum is
committed whole or not at all; a server that takes a part of its members takes none of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from fedsync.core.orders import WorkReport
from fedsync.core.weighting import Weighting
from fedsync.model.transfer import Payload


@dataclass(frozen=True, slots=True, eq=False)
class RegionSum:
    """Some updates of a region, added up.

    Args:
        update_ids: of its members, in order; each once.
        payload: as it travels: of one member its update as it came, else what `RegionAdder.sums` makes.
    """

    update_ids: tuple[str, ...]
    payload: Payload


class RegionAdder(Protocol):
    """What adds the updates of a region, at its relay."""

    @property
    def upload_bytes(self) -> int:
        """Size of a silo's update as it travels."""

    def put(self, silo: str, update_id: str, base: int, share: float, update: Payload) -> None:
        """Keep an update, after every check that the server would make.

        Args:
            silo: who sent it.
            update_id: of the order that it answers.
            base: version that the order began with.
            share: what it counts among others of the region, positive.
            update: as it came.

        Raises:
            ProtocolError: the silo sent something else.
        """

    def discard(self, update_id: str) -> None:
        """Forget an update, if it is there."""

    def sums(self, update_ids: Collection[str]) -> Sequence[RegionSum]:
        """Sums of these updates, which are not kept any longer: one for those that may be in one."""


def share_of(weighting: Weighting, examples: int, report: WorkReport) -> float:
    """What an update counts among others of one base: w_i / a_i of `fedsync.core.weighting`."""
    return weighting.weight(examples, report.samples) / weighting.progress(report.steps)
