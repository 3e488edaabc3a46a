"""The last order that a silo finished, on disk: what was answered, and where the next one begins in the data.

One file, replaced as a whole, so that after a crash the order is either done, and asked again is answered without a
second training, or it never happened. The optimiser has no part in it: every order begins with a new one.

| bytes | what |
|---|---|
| 32 | SHA-256 of the line |
| to a multiple of 64 | a line of JSON: order, report, cursor, and names, sizes and SHA-256s of what follows |
| to `LastOrder.update_at` | vectors that the next order goes by, if there are any |
| as many as the line says | the update, as it travels |
| to the end | private parts of the model |

So the update can be sent from the file, and whoever has finished an order need not keep it in memory.

Where an order was queued behind another, both answers may still be asked for. `LastOrders` keeps two then, in files
that take turns: an answer lies where it is until the order after the next is done.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Self

import numpy as np

from fedsync.common.checksums import digested, undigested
from fedsync.common.files import OWNER_FILE, write_pieces
from fedsync.core.codec import decode, encode
from fedsync.core.errors import PolicyError
from fedsync.core.layout import Vector
from fedsync.core.orders import WorkOrder, WorkReport
from fedsync.core.spans import FilePart, digest, file_part, map_file, pieces
from fedsync.core.transfer import Payload
from fedsync.train.sampler import Cursor
from fedsync.trainer.protocol import ANSWERS, Completed

logger = logging.getLogger(__name__)

_ALIGNED = 64
"""Bytes; the update begins at a multiple of it, so that a map of it is an array like any other."""

_DIGEST_BYTES = 32


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
        update, private = self.answer.update, self.cursor.private
        apart = {name: each for name, each in self.beside.items() if not np.may_share_memory(each, update)}
        about = {
            "order": encode(self.order),
            "report": encode(self.answer.report),
            "cursor": encode(replace(self.cursor, private=b"")),
            "number": self.number,
            "dtype": update.dtype.name,
            "same": [name for name in self.beside if name not in apart],
            "beside": {name: [each.nbytes, digest(each).hex()] for name, each in apart.items()},
            "update": [update.nbytes, digest(update).hex()],
            "private": hashlib.sha256(private).hexdigest(),
        }
        text = json.dumps(about, separators=(",", ":")).encode()
        begins = -(-(_DIGEST_BYTES + len(text) + 1) // _ALIGNED) * _ALIGNED
        head = digested(text.ljust(begins - _DIGEST_BYTES - 1) + b"\n")
        vectors = chain.from_iterable(map(pieces, apart.values()))
        write_pieces(path, chain((head,), vectors, pieces(update), (private,)), OWNER_FILE)
        beside, update = _mapped(path, about, begins)
        return replace(self, answer=replace(self.answer, update=update), beside=beside)

    @classmethod
    def load(cls, path: Path) -> LastOrder | None:
        """What the file has; None where there is none, or none that is whole."""
        if not path.exists():
            return None
        found = _read(path)
        if found is None:
            logger.warning("%s is corrupt: this silo begins anew in its data", path)
            return None
        about, beside, update, private = found
        answer = Completed(decode(WorkReport, about["report"], own=True), update)
        cursor = replace(decode(Cursor, about["cursor"], own=True), private=private)
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


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Vector], Payload, bytes] | None:
    """The line of the file, the vectors, the update and private parts; None where one is not what was written."""
    with path.open("rb") as file:
        line = undigested(file.read(_DIGEST_BYTES) + file.readline())
        if line is None:
            return None
        about, begins = json.loads(line), file.tell()
        ends = begins + sum(nbytes for nbytes, _ in about["beside"].values()) + about["update"][0]
        file.seek(ends)
        private = file.read()
    # A shorter file has no private parts that fit, a longer one has too many.
    if hashlib.sha256(private).hexdigest() != about["private"] or path.stat().st_size < ends:
        return None
    beside, update = _mapped(path, about, begins)
    expected = {**{name: hashed for name, (_, hashed) in about["beside"].items()}, "": about["update"][1]}
    found = {**{name: digest(beside[name]).hex() for name in about["beside"]}, "": digest(update).hex()}
    return (about, beside, update, private) if found == expected else None


def _mapped(path: Path, about: Mapping[str, Any], begins: int) -> tuple[dict[str, Vector], Payload]:
    """The vectors, by name, and the update."""
    beside: dict[str, Vector] = {}
    for name, (nbytes, _) in about["beside"].items():
        beside[name] = map_file(path, np.float32, begins, nbytes // 4)
        begins += nbytes
    dtype = np.dtype(about["dtype"])
    update = map_file(path, dtype, begins, about["update"][0] // dtype.itemsize)
    return {**beside, **dict.fromkeys(about["same"], update)}, update
