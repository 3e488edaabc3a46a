"""A silo's own last update, a share of which a queued order begins with on top of its model.

A queued order's model is older than that update: it has nothing of the round before. With a share of 1 the silo goes on
from where it is, and what others found in that round comes one order later (CoCoD-SGD); with less it is pulled back
towards the model that all have (cf. Overlap Local-SGD). What it sends is what it adds from there on.
"""

from __future__ import annotations

import numpy as np

from fedsync.core.errors import SERVER, ProtocolError
from fedsync.core.layout import Vector
from fedsync.core.orders import WorkOrder
from fedsync.core.spans import give_back, spans


class OwnProgress:
    """Kept in memory alone: a trainer that was restarted begins with the model as it came."""

    def __init__(self) -> None:
        self._kept: tuple[str, Vector] | None = None

    def start(self, order: WorkOrder, model: Vector) -> Vector:
        """Where training begins, float32 [values]: ``model``, where there is nothing to carry.

        Raises:
            ProtocolError: the server wants more carried than there is.
        """
        if not 0 <= order.carry <= 1:
            raise ProtocolError(SERVER, "order", f"carry {order.carry}, from 0 to 1")
        if self._kept is None or not order.behind or self._kept[0] != order.behind:
            return model
        start, own, share = np.empty_like(model), self._kept[1], np.float32(order.carry)
        for begin, stop in spans(model.size, 4):
            np.multiply(own[begin:stop], share, out=start[begin:stop])
            start[begin:stop] += model[begin:stop]
            give_back(model)
        return start

    def keep(self, order: WorkOrder, update: Vector) -> None:
        """What an order brought, float32 [values], as long as orders say that it may be carried on."""
        self._kept = (order.update_id, update.copy()) if order.carry else None
