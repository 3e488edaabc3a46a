"""The last order that a silo finished, on disk: what was answered, and where the next one begins in the data.

One file, replaced as a whole, so that after a crash the order is either done, and asked again is answered without a
second training, or it never happened. The optimiser has no part in it: every order begins with a new one.

| bytes | what |
|---|---|
| 32 | SHA-256 of the line |
| to a multiple of 64 | a line of JSON: order, report, cursor, and SHA-256s of what follows |
| to `LastOrder.update_at` | what is owed, if anything is |
| as many as the line says | the update, as it travels |
| to the end | private parts of the model |

So the update can be sent from the file, and whoever has finished an order need not keep it in memory.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
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
from fedsync.trainer.protocol import Completed

logger = logging.getLogger(__name__)

_ALIGNED = 64
"""Bytes; the update begins at a multiple of it, so that a map of it is an array like any other."""

_DIGEST_BYTES = 32
_NOTHING: Vector = np.empty(0, np.float32)


@dataclass(frozen=True, slots=True)
class LastOrder:
    """An order, its answer, and the silo's place in its data afterwards.

    Args:
        order: what was asked.
        answer: what was answered.
        cursor: where the next order begins.
        owed: what the next update makes up for, float32 [values]; see `fedsync.core.plain_replica`.
    """

    order: WorkOrder
    answer: Completed
    cursor: Cursor
    owed: Vector | None = None

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
        owed = _NOTHING if self.owed is None else self.owed
        about = {
            "order": encode(self.order),
            "report": encode(self.answer.report),
            "cursor": encode(replace(self.cursor, private=b"")),
            "dtype": update.dtype.name,
            "owed": [owed.nbytes, digest(owed).hex()],
            "update": [update.nbytes, digest(update).hex()],
            "private": hashlib.sha256(private).hexdigest(),
        }
        text = json.dumps(about, separators=(",", ":")).encode()
        begins = -(-(_DIGEST_BYTES + len(text) + 1) // _ALIGNED) * _ALIGNED
        head = digested(text.ljust(begins - _DIGEST_BYTES - 1) + b"\n")
        write_pieces(path, chain((head,), pieces(owed), pieces(update), (private,)), OWNER_FILE)
        owed, update = _mapped(path, about, begins)
        return replace(self, answer=replace(self.answer, update=update), owed=owed if owed.size else None)

    @classmethod
    def load(cls, path: Path) -> LastOrder | None:
        """What the file has; None where there is none, or none that is whole."""
        if not path.exists():
            return None
        found = _read(path)
        if found is None:
            logger.warning("%s is corrupt: this silo begins anew in its data", path)
            return None
        about, owed, update, private = found
        answer = Completed(decode(WorkReport, about["report"], own=True), update)
        cursor = replace(decode(Cursor, about["cursor"], own=True), private=private)
        return cls(decode(WorkOrder, about["order"], own=True), answer, cursor, owed if owed.size else None)


def _read(path: Path) -> tuple[dict[str, Any], Vector, Payload, bytes] | None:
    """The line of the file, what is owed, the update and private parts; None where one is not what was written."""
    with path.open("rb") as file:
        line = undigested(file.read(_DIGEST_BYTES) + file.readline())
        if line is None:
            return None
        about, begins = json.loads(line), file.tell()
        ends = begins + about["owed"][0] + about["update"][0]
        file.seek(ends)
        private = file.read()
    # A shorter file has no private parts that fit, a longer one has too many.
    if hashlib.sha256(private).hexdigest() != about["private"] or path.stat().st_size < ends:
        return None
    owed, update = _mapped(path, about, begins)
    whole = (digest(owed).hex(), digest(update).hex()) == (about["owed"][1], about["update"][1])
    return (about, owed, update, private) if whole else None


def _mapped(path: Path, about: Mapping[str, Any], begins: int) -> tuple[Vector, Payload]:
    """What is owed, and the update."""
    dtype, (owed_bytes, _) = np.dtype(about["dtype"]), about["owed"]
    owed = map_file(path, np.float32, begins, owed_bytes // 4)
    return owed, map_file(path, dtype, begins + owed_bytes, about["update"][0] // dtype.itemsize)
