"""Local carry-over: a queued order (training request) starts from its model plus a share of the silo's last update.

The model of a queued order is older than this update, and lacks the previous round. With a share of 1 the silo
continues from its own position, and the other silos' progress arrives one order later (CoCoD-SGD). A smaller share
pulls the silo back towards the common model (cf. Overlap Local-SGD). The next update holds only the progress from this
starting point.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedsync.common.errors import SERVER, ProtocolError
from fedsync.core.orders import WorkOrder
from fedsync.model.chunked_arrays import ArrayKeeper, give_back
from fedsync.model.layout import Vector
from fedsync.silo.session.order_results import LastOrder
from fedsync.silo.session.session_extension import SessionExtension

CARRIED, OWN = "carried", "own"  # subfolder for vectors in use; name of the vector beside a last order


class LocalCarryover(SessionExtension):
    """A silo's last update, as long as orders may carry it over; it is saved with the last order. Large vectors are in
    the trainer's ``folder``, if given. If the payload reuses the update's memory (not ``sent_as_it_is``), a copy is
    kept.
    """

    def __init__(self, folder: Path | None = None, *, sent_as_it_is: bool) -> None:
        self._keeper = ArrayKeeper(None if folder is None else folder / CARRIED, or_memory=True)
        self._sent_as_it_is = sent_as_it_is
        self._kept: tuple[str, Vector] | None = None

    def start(self, order: WorkOrder, model: Vector) -> Vector:
        """Return the start of training, float32 [values]; ``model`` itself if nothing is carried over. `ProtocolError`
        if the order's share is not within 0..1.
        """
        if not (order.behind or order.carry):
            return model
        if not 0 <= order.carry <= 1:
            raise ProtocolError(SERVER, "order", f"carry {order.carry}, from 0 to 1")
        if self._kept is None or not order.behind or self._kept[0] != order.behind:
            return model
        own, share = self._kept[1], np.float32(order.carry)

        def part(begin: int, stop: int) -> Vector:
            further: Vector = own[begin:stop] * share
            further += model[begin:stop]
            give_back(own, model)
            return further

        return self._keeper.make(np.float32, model.size, part)

    def beside(self, order: WorkOrder, update: Vector) -> dict[str, Vector]:
        if not order.carry or order.scores_only:
            return {}
        if self._sent_as_it_is:
            return {OWN: update}
        return {OWN: self._keeper.make(np.float32, update.size, lambda start, stop: update[start:stop].copy())}

    def done(self, last: LastOrder) -> None:
        own = last.beside.get(OWN)
        if last.order.behind or last.order.carry:
            self._kept = None if own is None else (last.order.update_id, own)
