"""Adder of unencrypted updates at a relay: one weighted mean of its silos' updates for each base version."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from fedsync.common.errors import ProtocolError
from fedsync.extras.relays.region_sums import RegionSum
from fedsync.model.chunked_arrays import ArrayKeeper, give_back
from fedsync.model.layout import Vector
from fedsync.model.plain_wire import WireFormat, check_values
from fedsync.model.transfer import Payload


class PlainRegion:
    """A `fedsync.extras.relays.region_sums.RegionAdder` of updates in the clear.

    Sums are float32 for any format of the updates, so they are rounded only once.

    Args:
        size: number of values in an update.
        wire: format of the silos' updates.
        keeper: store of updates and sums; by default in memory.
    """

    def __init__(self, size: int, wire: WireFormat, keeper: ArrayKeeper | None = None) -> None:
        self._size = size
        self._wire = wire
        self._keeper = keeper or ArrayKeeper()
        self._kept: dict[str, tuple[int, float, Payload]] = {}

    @property
    def upload_bytes(self) -> int:
        return self._wire.payload_bytes(self._size)

    def put(self, silo: str, update_id: str, base: int, share: float, update: Payload) -> None:
        if update_id in self._kept:
            raise ProtocolError(silo, "update id", f"{update_id!r} is here already")
        check_values(self._wire, self._size, silo, update)
        self._kept[update_id] = base, share, self._keeper.keep(update)

    def discard(self, update_id: str) -> None:
        self._kept.pop(update_id, None)

    def sums(self, update_ids: Collection[str]) -> list[RegionSum]:
        by_base: dict[int, dict[str, tuple[float, Payload]]] = {}
        for update_id in sorted(update_ids):
            base, share, payload = self._kept.pop(update_id)
            by_base.setdefault(base, {})[update_id] = share, payload
        return [self._sum(updates) for _, updates in sorted(by_base.items())]

    def _sum(self, updates: dict[str, tuple[float, Payload]]) -> RegionSum:
        if len(updates) == 1:
            ((update_id, (_, payload)),) = updates.items()
            return RegionSum((update_id,), payload)
        whole = sum(share for share, _ in updates.values())

        def mean(start: int, stop: int) -> Vector:
            total = np.zeros(stop - start, np.float32)
            for share, payload in updates.values():
                total += np.float32(share / whole) * self._wire.decode(payload, start, stop)
            give_back(*(payload for _, payload in updates.values()))
            return total

        return RegionSum(tuple(updates), self._keeper.make(np.float32, self._size, mean))
