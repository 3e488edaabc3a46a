"""The last order that a silo finished, on disk: what was answered, and where the next one begins in the data.

One file (`fedsync.silo.session.vector_file`), replaced as a whole, so that after a crash the order is either done, and asked
again is answered without a second training, or it never happened. The optimiser has no part in it: every order begins
with a new one. Its line has order, report and cursor; its vectors are those that the next order goes by, if there are
any, and the update as it travels; private parts of the model are the rest. So the update can be sent from the file, and
whoever has finished an order need not keep it in memory.

Where an order was queued behind another, both answers may still be asked for. `LastOrders` keeps two then, in files
that take turns: an answer lies where it is until the order after the next is done.
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
from fedsync.core.cursor import Cursor
from fedsync.core.orders import WorkOrder, WorkReport
from fedsync.model.chunked_arrays import FilePart, file_part
from fedsync.model.layout import Vector
from fedsync.silo.protocol import ANSWERS, Completed
from fedsync.silo.session.vector_file import VectorFile

logger = foreign.logger(__name__)

_UPDATE = ""
"""Name of the update among a file's vectors; the others are named by who goes by them."""


@dataclass(frozen=True, slots=True)
class LastOrder:
    """An order, its answer, and the silo's place in its data afterwards.

    Args:
        order: what was asked.
        answer: what was answered.
        cursor: where the next order begins.
        beside: vectors that the next order goes by, by name, float32 [values]; one may be the update itself.
        number: of the orders that this silo has finished.
    """

    order: WorkOrder
    answer: Completed
    cursor: Cursor
    beside: Mapping[str, Vector] = field(default_factory=dict)
    number: int = 0

    @property
    def update_at(self) -> FilePart:
        """Where the update lies, once it is saved or loaded; the next order replaces the file, not what is in it.

        Raises:
            PolicyError: the update is in memory.
        """
        part = file_part(self.answer.update)
        if part is None:
            raise PolicyError(f"the update {self.order.update_id!r} is in no file")
        return part

    def save(self, path: Path) -> Self:
        """Write the file; it is on disk when this returns.

        Returns:
            The same, whose update is a map of the file.

        Raises:
            ConfigError: the disk does not take it.
        """
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
        """What the file has; None where there is none, or none that is whole."""
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
    """The last order that a silo finished, and the one before it, where one of them was queued behind the other.

    Args:
        folder: where they are kept; None keeps none.
    """

    def __init__(self, folder: Path | None) -> None:
        self._paths = () if folder is None else tuple(folder / name for name in ANSWERS)
        found = [(path, last) for path in self._paths if (last := LastOrder.load(path)) is not None]
        self._kept = sorted(found, key=lambda each: each[1].number)

    @property
    def kept(self) -> tuple[LastOrder, ...]:
        """Two at most, the newest last."""
        return tuple(last for _, last in self._kept)

    @property
    def last(self) -> LastOrder | None:
        return self._kept[-1][1] if self._kept else None

    def add(self, order: LastOrder) -> LastOrder:
        """Another is done: where there is a folder, it is on disk when this returns, with its update in the file.

        Raises:
            ConfigError: the disk does not take it; the last one is still there.
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
            other.unlink(missing_ok=True)  # before: of two files that are there, one was queued behind the other
        saved = replace(order, number=0 if last is None else last.number + 1).save(place)
        self._kept = [*(each for each in self._kept if each[0] != place), (place, saved)]
        return saved


def _queued(one: WorkOrder, other: WorkOrder) -> bool:
    """Whether a silo was given one of two orders while it had the other, so that both may still be asked for."""
    return other.behind == one.update_id or one.behind == other.update_id


def _beside(vectors: Mapping[str, NDArray[Any]], same: list[str]) -> dict[str, Vector]:
    """What is beside the update, by name; ``same`` are names of the update itself."""
    beside = {name: each for name, each in vectors.items() if name != _UPDATE}
    return {**beside, **dict.fromkeys(same, vectors[_UPDATE])}
