"""Extensions of a silo's session: what they change of an order and of its update counts."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from fedsync.core.orders import WorkOrder
from fedsync.silo.protocol import ANSWER
from fedsync.silo.session.current_order import LastOrder
from fedsync.silo.session.session_extension import SessionExtension
from fedsync.train.silo_trainer import Outcome
from tests.silo.test_wire import session


class Halving(SessionExtension):
    """Extension that halves an order's steps and its update, and lets nothing be evaluated."""

    def allow(self, order: WorkOrder) -> WorkOrder:
        return replace(order, max_steps=order.max_steps // 2)

    def as_trained(self, order: WorkOrder) -> WorkOrder:
        return replace(order, evaluate=False)

    def released(self, order: WorkOrder, outcome: Outcome) -> Outcome:
        return replace(outcome, update=outcome.update / np.float32(2))


def test_changes_of_an_extension_count(tmp_path: Path) -> None:
    plain, silo = session(tmp_path / "plain", "{}"), session(tmp_path / "a", "{}")
    silo._extensions.append(Halving())
    order, model = WorkOrder("a/1", 0, 1, 8, 2, 0.1, 1), plain.initial_model()
    expected = plain.train(replace(order, max_steps=1, evaluate=False), model)
    done = silo.train(order, model)
    assert (done.report.steps, done.report.evaluation) == (1, None)
    np.testing.assert_array_equal(done.update, expected.update / np.float32(2))
    kept = LastOrder.load(tmp_path / "a" / ANSWER)
    assert kept is not None
    np.testing.assert_array_equal(kept.answer.update, done.update)
