"""Extensions of a silo's session: their hooks come in order."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedsync.common.errors import OwnerRefusal
from fedsync.core.orders import Evaluation, WorkOrder
from fedsync.model.layout import Vector
from fedsync.silo.protocol import EvaluateModel
from fedsync.silo.session.order_results import LastOrder, LastOrders
from fedsync.silo.session.session_extension import Judge, SessionExtension
from fedsync.train.silo_trainer import Outcome
from tests.silo.test_wire import session

ORDER = WorkOrder("a/1", 0, 1, 8, 2, 0.1, 1)


class Recorder(SessionExtension):
    """Extension that records its hooks, halves the steps and the update, and saves a vector."""

    def __init__(self) -> None:
        self.called: list[str] = []
        self.last: LastOrder | None = None

    def allow(self, order: WorkOrder) -> WorkOrder:
        self.called.append("allow")
        if order.max_steps > 9:
            raise OwnerRefusal("order", "too long", "Ask for less")
        return replace(order, max_steps=order.max_steps // 2)

    def begins(self, order: WorkOrder) -> None:
        self.called.append("begins")

    def as_trained(self, order: WorkOrder) -> WorkOrder:
        self.called.append("as_trained")
        return replace(order, evaluate=False)

    def start(self, order: WorkOrder, model: Vector) -> Vector:
        self.called.append("start")
        return model

    def correction(self, order: WorkOrder) -> Vector | None:
        self.called.append("correction")
        return None

    def released(self, order: WorkOrder, outcome: Outcome) -> Outcome:
        self.called.append("released")
        return replace(outcome, update=outcome.update / np.float32(2))

    def beside(self, order: WorkOrder, update: Vector) -> Mapping[str, Vector]:
        self.called.append("beside")
        return {"half": update.copy()}

    def done(self, last: LastOrder) -> None:
        self.called.append("done")
        self.last = last

    def judged(self, judge: Judge, what: str) -> Evaluation | None:
        self.called.append(what)
        return replace(judge(False), samples=1)


def test_hooks_come_in_order_and_their_changes_count(tmp_path: Path) -> None:
    plain, silo, recorder = session(tmp_path / "plain", "{}"), session(tmp_path / "a", "{}"), Recorder()
    silo._extensions.append(recorder)
    model = plain.initial_model()
    expected = plain.train(replace(ORDER, max_steps=1, evaluate=False), model)
    done = silo.train(ORDER, model)
    assert recorder.called == ["allow", "begins", "as_trained", "start", "correction", "released", "beside", "done"]
    assert (done.report.steps, done.report.evaluation) == (1, None)
    np.testing.assert_array_equal(done.update, expected.update / np.float32(2))
    (kept,) = LastOrders(tmp_path / "a").kept
    np.testing.assert_array_equal(kept.beside["half"], done.update)
    assert recorder.last is not None and recorder.last.answer.report == done.report


def test_an_extension_refuses_orders_and_answers_evaluations(tmp_path: Path) -> None:
    silo, recorder = session(tmp_path / "a", "{}"), Recorder()
    silo._extensions.append(recorder)
    with pytest.raises(OwnerRefusal, match="too long"):
        silo.train(replace(ORDER, max_steps=10), silo.initial_model())
    assert recorder.called == ["allow"] and not LastOrders(tmp_path / "a").kept
    told = silo.evaluate(silo.initial_model(), EvaluateModel(0))
    assert isinstance(told, Evaluation) and told.samples == 1
    assert recorder.called == ["allow", "version 0 validation"]
