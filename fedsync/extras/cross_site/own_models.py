"""Models that a silo trains for itself in a run, as baselines: from scratch (local), and from the best model (tuned).

These models never leave the silo, unless the owner shares the local model of an unencrypted run. Their orders do not
change the run's position in the data.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from fedsync.common.errors import SERVER, ProtocolError
from fedsync.core.orders import Cursor, Subject, WorkOrder, WorkReport
from fedsync.model.layout import Vector
from fedsync.model.transfer import NO_PAYLOAD, Payload, Replica
from fedsync.silo.protocol import Completed
from fedsync.silo.session.current_order import LastOrder

if TYPE_CHECKING:
    from fedsync.train.silo_trainer import Outcome, Watch

SUBJECTS = (Subject.LOCAL, Subject.TUNED)


class OwnModels:
    """Models that a silo trains for itself in one run: from scratch (local), and from the best model (tuned).

    Each is the update of a `LastOrder` in a file of ``folder``; None keeps them in memory. An order older than the kept
    model counts as done: a server that was restored from a checkpoint repeats such orders.
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
        return tuple(self._kept)

    def model(self, subject: Subject) -> tuple[Vector, Cursor]:
        """Return a model, float32 [values], and the cursor after its training; `ProtocolError` if there is none."""
        kept = self._kept.get(subject)
        if kept is None:
            raise ProtocolError(SERVER, "subject", f"this silo has trained no {subject} model")
        return kept.answer.update, kept.cursor

    def report(self, order: WorkOrder) -> WorkReport | None:
        """Return the report of an order that the kept model already includes."""
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
        """Keep the result of an order durably, or raise `ConfigError`."""
        made = LastOrder(order, Completed(report, model), cursor)
        self._kept[order.subject] = made if self._folder is None else made.save(self._file(order.subject))

    def _file(self, subject: Subject) -> Path:
        assert self._folder is not None
        return self._folder / f"{subject}.bin"


class SiloState(Protocol):
    """The part of a `fedsync.silo.session.session.SiloSession` that orders for own models need."""

    cursor: Cursor
    replica: Replica

    @property
    def sealed(self) -> bool: ...

    def initial_model(self) -> Vector: ...

    def receive(self, received: Payload, version: int) -> Vector: ...

    def run_apart(self, order: WorkOrder, base: Vector, cursor: Cursor, watch: Watch | None) -> Outcome: ...


class OwnOrders:
    """Handler of orders for the silo's own models; the session creates it at the first of these orders.

    Args:
        compared: models that the run's specification asks for; an encrypted run may ask for no other.
        share: whether the local model may leave the silo; never under encryption.
    """

    def __init__(self, session: SiloState, folder: Path | None, compared: tuple[Subject, ...], *, share: bool) -> None:
        self._session, self._models = session, OwnModels(folder)
        self._compared, self._share = compared, share

    def _check(self, subject: Subject) -> None:
        if self._session.sealed and subject not in self._compared:
            raise ProtocolError(SERVER, "subject", f"this run asks for no {subject} model")

    def model(self, subject: Subject) -> tuple[Vector, Cursor]:
        """Return a model, float32 [values], and its cursor; `ProtocolError` if there is none, or no run asks for it."""
        self._check(subject)
        return self._models.model(subject)

    def train(self, order: WorkOrder, received: Payload, watch: Watch | None) -> Completed:
        """Train a model further, unless the order is done; the answer has the model only if it is shared.

        A local model begins at the start of the data, with initial private parts. A tuned model begins with the run's
        cursor and private parts. Raises as `model`, and as `SiloSession.train`.
        """
        self._check(order.subject)
        report = self._models.report(order)
        if report is None:
            before = self._models.before(order)
            if before is None:
                alone = order.subject is Subject.LOCAL
                before = self._first(order, received), Cursor() if alone else self._session.cursor
            base, cursor = before
            outcome = self._session.run_apart(order, base, cursor, watch)
            report = self._session.replica.disclosed(outcome.report)
            self._models.keep(order, base + outcome.update, report, outcome.cursor)
        shared = self._models.model(order.subject)[0] if order.share and self._share else NO_PAYLOAD
        return Completed(report, shared)

    def _first(self, order: WorkOrder, received: Payload) -> Vector:
        """Return the start model of a first order, float32 [values]; in the clear, the order brings it.

        Raises `ProtocolError` without a best model of the order's version: a silo that missed sums has another.
        """
        session = self._session
        if not session.sealed:
            return session.receive(received, order.base_version)
        if order.subject is Subject.LOCAL:
            return session.initial_model()
        best, version = session.replica.best_model, session.replica.best_version
        if best is None:
            raise ProtocolError(SERVER, "subject", "there is no best model yet")
        if version != order.base_version:
            detail = f"the best model here is version {version}, not {order.base_version}"
            raise ProtocolError(SERVER, "subject", detail)
        return best
