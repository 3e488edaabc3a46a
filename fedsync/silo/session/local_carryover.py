"""A silo's own last update, a share of which a queued order begins with on top of its model.

A queued order's model is older than that update: it has nothing of the round before. With a share of 1 the silo goes on
from where it is, and what others found in that round comes one order later (CoCoD-SGD); with less it is pulled back
towards the model that all have (cf. Overlap Local-SGD). What it sends is what it adds from there on.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedsync.common.errors import SERVER, ProtocolError
from fedsync.core.orders import WorkOrder
from fedsync.model.array_keeper import ArrayKeeper
from fedsync.model.chunked_arrays import give_back
from fedsync.model.layout import Vector

CARRIED = "carried"
"""Folder, in a trainer's, of vectors that are in use."""


class OwnProgress:
    """A silo's last update, as long as orders say that it may be carried on; it is saved with the last order.

    Args:
        folder: of the trainer, where large vectors lie; None keeps them in memory.
        sent_as_it_is: what travels is the update itself; else its memory is used again for that.
    """

    def __init__(self, folder: Path | None = None, *, sent_as_it_is: bool) -> None:
        self._keeper = ArrayKeeper(None if folder is None else folder / CARRIED, or_memory=True)
        self._sent_as_it_is = sent_as_it_is
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
        own, share = self._kept[1], np.float32(order.carry)

        def part(begin: int, stop: int) -> Vector:
            further: Vector = own[begin:stop] * share
            further += model[begin:stop]
            give_back(own, model)
            return further

        return self._keeper.make(np.float32, model.size, part)

    def of(self, order: WorkOrder, update: Vector) -> Vector | None:
        """What the order behind this one may begin with, float32 [values]; taken before the update is sent."""
        if not order.carry or order.scores_only:
            return None
        if self._sent_as_it_is:
            return update
        return self._keeper.make(np.float32, update.size, lambda start, stop: update[start:stop].copy())

    def keep(self, order: WorkOrder, own: Vector | None) -> None:
        """What an order that is done has brought; None where nothing may be carried on."""
        self._kept = None if own is None else (order.update_id, own)
