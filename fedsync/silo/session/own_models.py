"""Models that a silo trains apart from the run and keeps: alone from the first (local), and from the best (tuned).

Each lies in a file of its own as a last order does (`fedsync.silo.session.last_order`), with the whole model in the place of
the update. So it is written with the order that it came of, and an order that is asked for again, also after a
crash between this file and the answer's, is not done again. One that is behind counts as done: a server that was set
back asks for orders that the silo did before, and gets the same model in the end.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fedsync.common.errors import SERVER, ProtocolError
from fedsync.core.cursor import Cursor
from fedsync.core.orders import Subject, WorkOrder, WorkReport
from fedsync.model.layout import Vector
from fedsync.silo.protocol import Completed
from fedsync.silo.session.last_order import LastOrder

SUBJECTS = (Subject.LOCAL, Subject.TUNED)


class OwnModels:
    """A silo's own models of one run.

    Args:
        folder: where they are kept; None keeps them in memory.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._kept: dict[Subject, LastOrder] = {}
        for subject in SUBJECTS if folder is not None else ():
            found = LastOrder.load(self._file(subject))
            if found is not None:
                self._kept[subject] = found

    @property
    def subjects(self) -> tuple[Subject, ...]:
        """Those of which there is a model."""
        return tuple(self._kept)

    def model(self, subject: Subject) -> tuple[Vector, Cursor]:
        """A model, float32 [values], and what else it left at the silo.

        Raises:
            ProtocolError: there is none.
        """
        kept = self._kept.get(subject)
        if kept is None:
            raise ProtocolError(SERVER, "subject", f"this silo has trained no {subject} model")
        return kept.answer.update, kept.cursor

    def report(self, order: WorkOrder) -> WorkReport | None:
        """What was reported of an order, if the model has it behind it, or one after it."""
        kept = self._kept.get(order.subject)
        if kept is None or order.after > kept.order.after or order.base_version != kept.order.base_version:
            return None
        done = kept.answer.report
        steps = min(done.steps, order.max_steps)
        return replace(done, steps=steps, samples=min(done.samples, steps * order.batch_size))

    def before(self, order: WorkOrder) -> tuple[Vector, Cursor] | None:
        """What an order continues; None where it is the first.

        Raises:
            ProtocolError: that is not here.
        """
        if order.after == 0:
            return None
        kept = self._kept.get(order.subject)
        if kept is None or (kept.order.after, kept.order.base_version) != (order.after - 1, order.base_version):
            raise ProtocolError(SERVER, "order", f"the {order.subject} model after {order.after} orders is not here")
        return kept.answer.update, kept.cursor

    def keep(self, order: WorkOrder, model: Vector, report: WorkReport, cursor: Cursor) -> None:
        """Keep what an order came to; it is on disk when this returns.

        Raises:
            ConfigError: the disk does not take it.
        """
        made = LastOrder(order, Completed(report, model), cursor)
        self._kept[order.subject] = made if self._folder is None else made.save(self._file(order.subject))

    def _file(self, subject: Subject) -> Path:
        assert self._folder is not None
        return self._folder / f"{subject}.bin"
