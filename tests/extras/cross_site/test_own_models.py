"""What a silo trains apart from the run: durable, done once, and nothing of it travels."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedsync.common.errors import ConfigError, ProtocolError
from fedsync.core.orders import Split, Subject, WorkOrder
from fedsync.model.layout import Vector
from fedsync.model.transfer import NO_PAYLOAD
from fedsync.silo.owner.owner_policy import OwnerPolicy
from fedsync.silo.protocol import EvaluateModel
from fedsync.silo.session import current_order
from fedsync.silo.session.session import SiloSession
from tests.silo.test_wire import session

LOCAL = [
    WorkOrder(f"a/{9 + after}", 0, 9 + after, 8, 2, 0.1, 9, evaluate=False, subject=Subject.LOCAL, after=after)
    for after in range(3)
]
TUNED = WorkOrder("a/20", 5, 20, 8, 3, 0.1, seed=3, evaluate=False, subject=Subject.TUNED)
FEDERATED = WorkOrder("a/1", 0, 1, 8, 2, 0.1, seed=1, evaluate=False)


@pytest.fixture
def silo(tmp_path: Path) -> SiloSession:
    return session(tmp_path / "a", "{}")


def local(silo: SiloSession) -> Vector:
    return silo._own.model(Subject.LOCAL)[0].copy()


def trained(silo: SiloSession, first: Vector, orders: int = 3) -> Vector:
    for order in LOCAL[:orders]:
        silo.train(order, first if order.after == 0 else NO_PAYLOAD)
    return local(silo)


def test_alone_it_does_what_it_would_in_a_federation_of_its_own(tmp_path: Path, silo: SiloSession) -> None:
    """Three orders apart, after it has worked for the run: as three orders of a run in which nobody else is."""
    first = silo.initial_model()
    silo.train(FEDERATED, first)
    other, model = session(tmp_path / "b", "{}"), first
    for order in LOCAL:
        model = model + other.train(replace(order, subject=Subject.LAST, after=0), model).update
    np.testing.assert_allclose(trained(silo, first), model, atol=1e-6)


def test_nothing_travels_and_the_run_goes_on_where_it_was(silo: SiloSession) -> None:
    first = silo.initial_model()
    silo.train(FEDERATED, first)
    cursor = silo.cursor
    done = silo.train(LOCAL[0], first)
    assert done.update.nbytes == 0 and silo.cursor == cursor
    assert (done.report.steps, done.report.samples) == (2, 16)


def test_a_trainer_that_died_goes_on_with_its_model(tmp_path: Path, silo: SiloSession) -> None:
    first = silo.initial_model()
    expected = trained(silo, first)
    trained(session(tmp_path / "b", "{}"), first, orders=2)
    again = session(tmp_path / "b", "{}")
    again.train(LOCAL[2], NO_PAYLOAD)
    np.testing.assert_array_equal(local(again), expected)


def test_an_order_is_done_once_though_its_answer_was_lost(
    tmp_path: Path, silo: SiloSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the model's file and the answer's: the order is asked for again, and is not done twice."""
    first = silo.initial_model()
    expected = trained(silo, first, orders=2)
    shaken, real = session(tmp_path / "b", "{}"), current_order.LastOrder.save
    shaken.train(LOCAL[0], first)

    def dies(last: current_order.LastOrder, path: Path) -> current_order.LastOrder:
        if path.name == "answer.bin":
            raise ConfigError("answer.bin", "killed", "")
        return real(last, path)

    with monkeypatch.context() as killed:
        killed.setattr(current_order.LastOrder, "save", dies)
        with pytest.raises(ConfigError, match="killed"):
            shaken.train(LOCAL[1], NO_PAYLOAD)
    again = session(tmp_path / "b", "{}")
    report = again.train(LOCAL[1], NO_PAYLOAD).report
    np.testing.assert_array_equal(local(again), expected)
    assert report.samples == 16


def test_a_server_that_was_set_back_finds_what_is_done(silo: SiloSession) -> None:
    """It asks for all of it again, under other names."""
    first = silo.initial_model()
    expected = trained(silo, first)
    for order in LOCAL:
        again = replace(order, update_id=f"a/{order.round + 50}", round=order.round + 50, seed=1)
        assert silo.train(again, first).report.samples == 16
    np.testing.assert_array_equal(local(silo), expected)


@pytest.mark.parametrize("order", [LOCAL[2], replace(LOCAL[1], base_version=4)], ids=["skipped", "another base"])
def test_an_order_that_continues_what_is_not_here_is_refused(silo: SiloSession, order: WorkOrder) -> None:
    with pytest.raises(ProtocolError, match="no local model"):
        silo._own.model(Subject.LOCAL)
    silo.train(LOCAL[0], silo.initial_model())
    with pytest.raises(ProtocolError, match="is not here"):
        silo.train(order, NO_PAYLOAD)


def test_tuning_from_another_version_begins_anew(silo: SiloSession) -> None:
    first = silo.initial_model()
    silo.train(TUNED, first)
    before = silo._own.model(Subject.TUNED)[0].copy()
    silo.train(replace(TUNED, update_id="a/30", round=30, base_version=6), first + np.float32(0.01))
    assert not np.array_equal(silo._own.model(Subject.TUNED)[0], before)


@pytest.mark.parametrize(("allowed", "travels"), [(True, True), (False, False), (None, False)])
def test_a_local_model_travels_with_its_owners_word_only(
    tmp_path: Path, silo: SiloSession, allowed: bool | None, travels: bool
) -> None:
    """None: nobody has said anything, and the silo is emulated by nobody."""
    silo._owner = OwnerPolicy(share_local=allowed)
    sent = silo.train(replace(LOCAL[0], share=True), silo.initial_model()).update
    assert np.array_equal(sent, local(silo)) if travels else sent.nbytes == 0
    tuned = silo.train(replace(TUNED, share=False), silo.initial_model())
    assert tuned.update.nbytes == 0


def test_another_silos_model_is_evaluated_here(tmp_path: Path, silo: SiloSession) -> None:
    """As it would be as the run's own; one of another length is refused."""
    model = silo.initial_model() + np.float32(0.01)
    asked = EvaluateModel(0, Split.TEST, Subject.LOCAL, "b")
    assert silo.evaluate(model, asked) == silo.evaluate(model, EvaluateModel(0, Split.TEST))
    with pytest.raises(ProtocolError):
        silo.evaluate(model[:-1], asked)
