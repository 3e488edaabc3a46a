"""Last order that a silo finished, on disk: its answer, and the start of the next order in the data.

It is one file (`fedsync.silo.session.vector_file`), replaced as a whole. So after a crash the order is either done, and
a repeated request gets the answer without a second training, or it never happened. The optimiser is not part of the
file, because every order begins with a new one. The JSON line has order, report and cursor. The vectors are those that
the next order needs, and the update in its transfer format. The rest holds the private parts of the model. The update
is sent from the file, so it need not stay in memory.

If an order was queued behind another, the server may still request both answers. `LastOrders` then keeps two, in files
that alternate: an answer stays in its file until the order after the next is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fedsync.common import foreign
from fedsync.common.codec import decode, encode
from fedsync.common.errors import PolicyError
from fedsync.core.orders import Cursor, WorkOrder, WorkReport
from fedsync.model.chunked_arrays import FilePart, file_part
from fedsync.model.layout import Vector
from fedsync.silo.protocol import ANSWERS, Completed
from fedsync.silo.session.vector_file import VectorFile

logger = foreign.logger(__name__)

_UPDATE = ""
"""Name of the update among a file's vectors; other vectors are named by their users."""


@dataclass(frozen=True, slots=True)
class LastOrder:
    """Completed order with its answer; ``cursor`` and ``beside`` are the position and vectors for the next order.

    The vectors are float32 [values] by name, and may include the update. ``number`` counts the silo's finished orders.
    """

    order: WorkOrder
    answer: Completed
    cursor: Cursor
    beside: Mapping[str, Vector] = field(default_factory=dict)
    number: int = 0

    @property
    def update_at(self) -> FilePart:
        """Location of the saved update, valid even after the file is replaced; `PolicyError` if it is in memory."""
        part = file_part(self.answer.update)
        if part is None:
            raise PolicyError(f"the update {self.order.update_id!r} is in no file")
        return part

    def save(self, path: Path) -> Self:
        """Write the file durably, or raise `ConfigError`; return the order with its update as a map of the file."""
        update = self.answer.update
        apart = {name: each for name, each in self.beside.items() if not np.may_share_memory(each, update)}
        about = {
            "order": encode(self.order),
            "report": encode(self.answer.report),
            "cursor": encode(replace(self.cursor, private=b"")),
            "number": self.number,
            "same": [name for name in self.beside if name not in apart],
        }
        vectors = VectorFile(about, {**apart, _UPDATE: update}, self.cursor.private).save(path)
        answer = replace(self.answer, update=vectors[_UPDATE])
        return replace(self, answer=answer, beside=_beside(vectors, about["same"]))

    @classmethod
    def load(cls, path: Path) -> LastOrder | None:
        """Load the file; None where it is missing or damaged."""
        if not path.exists():
            return None
        found = VectorFile.load(path)
        if found is None:
            logger.warning("%s is corrupt: this silo begins anew in its data", path)
            return None
        about, beside = found.about, _beside(found.vectors, found.about["same"])
        answer = Completed(decode(WorkReport, about["report"], own=True), found.vectors[_UPDATE])
        cursor = replace(decode(Cursor, about["cursor"], own=True), private=found.rest)
        return cls(decode(WorkOrder, about["order"], own=True), answer, cursor, beside, about["number"])


class LastOrders:
    """Last order that a silo finished, and the order before it if the two were queued; None as folder keeps none."""

    def __init__(self, folder: Path | None) -> None:
        self._paths = () if folder is None else tuple(folder / name for name in ANSWERS)
        found = [(path, last) for path in self._paths if (last := LastOrder.load(path)) is not None]
        self._kept = sorted(found, key=lambda each: each[1].number)

    @property
    def kept(self) -> tuple[LastOrder, ...]:
        """At most two orders, the newest last."""
        return tuple(last for _, last in self._kept)

    @property
    def last(self) -> LastOrder | None:
        return self._kept[-1][1] if self._kept else None

    def add(self, order: LastOrder) -> LastOrder:
        """Add a completed order; with a folder, it is on disk when this returns, with its update in the file.

        Raises `ConfigError` if the disk rejects the file; the previous order then stays.
        """
        if not self._paths:
            return order
        place, other = self._paths
        if self._kept and self._kept[-1][0] == other:
            place, other = other, place
        self._kept = self._kept[-1:]
        last = self.last
        if last is not None and _queued(last.order, order.order):
            place = other
        else:
            other.unlink(missing_ok=True)  # first, because two files together mean that one order was queued
        saved = replace(order, number=0 if last is None else last.number + 1).save(place)
        self._kept = [*(each for each in self._kept if each[0] != place), (place, saved)]
        return saved


def _queued(one: WorkOrder, other: WorkOrder) -> bool:
    """Return whether the orders were queued one behind the other, so that both answers may be requested."""
    return other.behind == one.update_id or one.behind == other.update_id


def _beside(vectors: Mapping[str, NDArray[Any]], same: list[str]) -> dict[str, Vector]:
    """Return the vectors beside the update by name; ``same`` lists names that mean the update itself."""
    beside = {name: each for name, each in vectors.items() if name != _UPDATE}
    return {**beside, **dict.fromkeys(same, vectors[_UPDATE])}
