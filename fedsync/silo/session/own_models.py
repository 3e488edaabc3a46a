"""Models that a silo trains for itself and keeps: one from scratch (local), one from the best model (tuned).

Each model lies in its own file in the format of a last order (`fedsync.silo.session.last_order`). The whole model takes
the place of the update, and the file also holds the order that produced it. So a repeated order is not trained twice,
even after a crash between this file and the answer's file. An order older than the kept model counts as done: a
server that was restored from a checkpoint repeats such orders, and the model already contains their work.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fedsync.common.errors import SERVER, ProtocolError
from fedsync.core.orders import Cursor, Subject, WorkOrder, WorkReport
from fedsync.model.layout import Vector
from fedsync.silo.protocol import Completed
from fedsync.silo.session.last_order import LastOrder

SUBJECTS = (Subject.LOCAL, Subject.TUNED)


class OwnModels:
    """Own models of a silo in one run, in files of ``folder``; None keeps them in memory."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._kept: dict[Subject, LastOrder] = {}
        for subject in SUBJECTS if folder is not None else ():
            found = LastOrder.load(self._file(subject))
            if found is not None:
                self._kept[subject] = found

    @property
    def subjects(self) -> tuple[Subject, ...]:
        return tuple(self._kept)

    def model(self, subject: Subject) -> tuple[Vector, Cursor]:
        """Return a model, float32 [values], and the silo's cursor after its training.

        Raises `ProtocolError` if there is no such model.
        """
        kept = self._kept.get(subject)
        if kept is None:
            raise ProtocolError(SERVER, "subject", f"this silo has trained no {subject} model")
        return kept.answer.update, kept.cursor

    def report(self, order: WorkOrder) -> WorkReport | None:
        """Return the report of an order that the kept model already includes; else None."""
        kept = self._kept.get(order.subject)
        if kept is None or order.after > kept.order.after or order.base_version != kept.order.base_version:
            return None
        done = kept.answer.report
        steps = min(done.steps, order.max_steps)
        return replace(done, steps=steps, samples=min(done.samples, steps * order.batch_size))

    def before(self, order: WorkOrder) -> tuple[Vector, Cursor] | None:
        """Return the model and cursor that an order continues; None for the first order.

        Raises `ProtocolError` if the preceding model is missing.
        """
        if order.after == 0:
            return None
        kept = self._kept.get(order.subject)
        if kept is None or (kept.order.after, kept.order.base_version) != (order.after - 1, order.base_version):
            raise ProtocolError(SERVER, "order", f"the {order.subject} model after {order.after} orders is not here")
        return kept.answer.update, kept.cursor

    def keep(self, order: WorkOrder, model: Vector, report: WorkReport, cursor: Cursor) -> None:
        """Keep the result of an order, on disk when this returns; raise `ConfigError` if the disk rejects it."""
        made = LastOrder(order, Completed(report, model), cursor)
        self._kept[order.subject] = made if self._folder is None else made.save(self._file(order.subject))

    def _file(self, subject: Subject) -> Path:
        assert self._folder is not None
        return self._folder / f"{subject}.bin"
