"""Updates in the clear that wait for their commit, one by one or as sums of regions.

A region's sum is the weighted mean of its members, float32 [values], and is kept under the first of their ids. It
counts as a whole: where one of its members is discarded, or not in the commit of the others, none of them counts.
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
    """What a commit adds.

    Args:
        weights: coefficient of each update or sum, by its first id, in the order of the commit.
        payloads: by the same ids.
        formats: how each is written, likewise.
        members: ids of all updates in it.
        left_out: ids of those that do not count.
    """

    weights: Mapping[str, float]
    payloads: Mapping[str, Payload]
    formats: Mapping[str, WireFormat]
    members: tuple[str, ...]
    left_out: tuple[str, ...]

    @property
    def summed(self) -> bool:
        """Whether a region's sum is in it, of whose parts nobody knows how large they are."""
        return len(self.members) > len(self.payloads)


class WaitingUpdates:
    """Those of one run, by id.

    Args:
        wire: how single updates are written.
    """

    def __init__(self, wire: WireFormat) -> None:
        self._wire = wire
        self.payloads: dict[str, Payload] = {}
        """Of single updates by id, of sums by the first of their ids."""
        self.sums: dict[str, tuple[str, ...]] = {}
        """Ids of the sum that an update is in, by id; its payload may be gone."""

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*self.payloads, *self.sums]))

    def add(self, sender: str, update_ids: Sequence[str], payload: Payload) -> None:
        """Keep an update, or the sum of several.

        Raises:
            ProtocolError: one of them is here already, or is named twice.
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
        """What a commit adds, which is not kept any longer. Of what does not count the rest makes up the weight.

        Raises:
            KeyError: an update is not here.
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
