"""The last order that a silo finished, on disk: what was answered, and where the next one begins in the data.

One file, replaced as a whole, so that after a crash the order is either done, and asked again is answered without a
second training, or it never happened. The optimiser has no part in it: every order begins with a new one.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedsync.common.checksums import digested, undigested
from fedsync.common.files import OWNER_FILE, write_atomically
from fedsync.core.codec import decode, encode
from fedsync.core.layout import Vector
from fedsync.core.orders import WorkOrder, WorkReport
from fedsync.train.sampler import Cursor
from fedsync.trainer.protocol import Completed

logger = logging.getLogger(__name__)


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

    def save(self, path: Path) -> None:
        """Write the file; it is on disk when this returns.

        Raises:
            ConfigError: the disk does not take it.
        """
        update, private = self.answer.update, self.cursor.private
        owed = b"" if self.owed is None else self.owed.tobytes()
        about = {
            "order": encode(self.order),
            "report": encode(self.answer.report),
            "cursor": encode(replace(self.cursor, private=b"")),
            "dtype": update.dtype.name,
            "private": len(private),
            "owed": len(owed),
        }
        body = json.dumps(about, separators=(",", ":")).encode() + b"\n" + private + owed + update.tobytes()
        write_atomically(path, digested(body), OWNER_FILE)

    @classmethod
    def load(cls, path: Path) -> LastOrder | None:
        """What the file has; None where there is none, or none that is whole."""
        if not path.exists():
            return None
        body = undigested(path.read_bytes())
        if body is None:
            logger.warning("%s is corrupt: this silo begins anew in its data", path)
            return None
        text, _, values = body.partition(b"\n")
        about = json.loads(text)
        kept, owing = about.get("private", 0), about.get("owed", 0)
        private, owed, update = values[:kept], values[kept : kept + owing], values[kept + owing :]
        report = decode(WorkReport, about["report"], own=True)
        answer = Completed(report, np.frombuffer(update, dtype=about["dtype"]))
        cursor = replace(decode(Cursor, about["cursor"], own=True), private=private)
        return cls(
            decode(WorkOrder, about["order"], own=True),
            answer,
            cursor,
            np.frombuffer(owed, np.float32) if owing else None,
        )
