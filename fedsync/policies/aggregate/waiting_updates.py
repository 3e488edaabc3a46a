"""Pending updates in the clear, as single updates or as sums of regions.

A region's sum is the weighted mean of its members, float32 [values], kept under the first of their ids. A sum counts
only as a whole: if a member is discarded, or missing in the commit of the others, no member counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedsync.common import foreign
from fedsync.common.errors import ProtocolError
from fedsync.model.plain_wire import FP32, WireFormat
from fedsync.model.transfer import Payload

logger = foreign.logger(__name__)


@dataclass(frozen=True, slots=True)
class Taken:
    """Content of a commit.

    Args:
        weights: coefficient of each update or sum, by its first id, in the order of the commit.
        payloads: payloads, by the same ids.
        formats: wire format of each payload, by the same ids.
        members: ids of all included updates.
        left_out: ids of the updates that do not count.
    """

    weights: Mapping[str, float]
    payloads: Mapping[str, Payload]
    formats: Mapping[str, WireFormat]
    members: tuple[str, ...]
    left_out: tuple[str, ...]

    @property
    def summed(self) -> bool:
        """Whether a region's sum is included; the sizes of its parts are unknown."""
        return len(self.members) > len(self.payloads)


class WaitingUpdates:
    """Pending updates of one run, by id; ``wire`` is the format of single updates."""

    def __init__(self, wire: WireFormat) -> None:
        self._wire = wire
        self.payloads: dict[str, Payload] = {}
        """Payloads of single updates by id, and of sums by their first id."""
        self.sums: dict[str, tuple[str, ...]] = {}
        """Ids of all members of an update's sum, by update id; the payload of the sum may be gone."""

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*self.payloads, *self.sums]))

    def add(self, sender: str, update_ids: Sequence[str], payload: Payload) -> None:
        """Keep an update, or the sum of several.

        Raises:
            ProtocolError: an update id is already in use, or is named twice.
        """
        for update_id in update_ids:
            if update_id in self.payloads or update_id in self.sums:
                raise ProtocolError(sender, "update id", f"{update_id!r} is here already")
        if not update_ids or len(set(update_ids)) != len(update_ids):
            raise ProtocolError(sender, "members", f"{len(update_ids)} updates, none of which may be there twice")
        self.payloads[update_ids[0]] = payload
        if len(update_ids) > 1:
            self.sums.update(dict.fromkeys(update_ids, tuple(update_ids)))

    def discard(self, update_id: str) -> None:
        whole = self.sums.pop(update_id, (update_id,))
        self.payloads.pop(whole[0], None)

    def take(self, weights: Mapping[str, float]) -> Taken:
        """Remove and return the updates of a commit; the others share the weight of updates that do not count.

        Raises:
            KeyError: an update is not pending.
        """
        used, left_out = dict[str, tuple[str, ...]](), []
        for update_id in weights:
            whole = self.sums.get(update_id, (update_id,))
            if whole[0] in used:
                continue
            if len(whole) > 1 and (whole[0] not in self.payloads or not weights.keys() >= set(whole)):
                logger.warning("%s is in a region's sum with one that does not count: neither does it", update_id)
                left_out.append(update_id)
            else:
                used[whole[0]] = whole
        payloads = {first: self.payloads.pop(first) for first in used}
        formats = {first: FP32 if len(whole) > 1 else self._wire for first, whole in used.items()}
        for update_id in left_out:
            self.discard(update_id)
        for whole in used.values():
            for member in whole:
                self.sums.pop(member, None)
        own = {first: sum(weights[member] for member in whole) for first, whole in used.items()}
        if left_out and own:
            share = sum(own.values()) / sum(weights.values())
            own = {first: weight / share for first, weight in own.items()}
        members = tuple(member for whole in used.values() for member in whole)
        return Taken(own, payloads, formats, members, tuple(left_out))
