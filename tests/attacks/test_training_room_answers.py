"""A training process says what cannot be: its session checks each answer. No process is needed to lie."""

from dataclasses import replace

import pytest

from fedsync.common.errors import RunError
from fedsync.core.orders import WorkReport
from fedsync.model.layout import Layout
from fedsync.silo.room.room_messages import OrderDone, TrainerBuilt, checked_order, checked_trainer
from fedsync.train.silo_trainer import TrainerFacts
from tests.attacks.test_training_room import order

DONE = OrderDone(WorkReport(0, 3, 12, 0.1, 0.5), 0, 12, "{}")
LIES = {
    "of another version": replace(DONE, report=replace(DONE.report, base_version=7)),
    "of no step": replace(DONE, report=replace(DONE.report, steps=0)),
    "of more steps than ordered": replace(DONE, report=replace(DONE.report, steps=4)),
    "of no time": replace(DONE, report=replace(DONE.report, compute_s=-1.0)),
    "of more than it was given": replace(DONE, report=replace(DONE.report, batch_cap=10**15)),
    "of a place behind its data": replace(DONE, position=21),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_order_ends_only_as_it_can(lie: str) -> None:
    assert checked_order(order(), DONE, 2, 20) is DONE
    with pytest.raises(RunError, match="impossible value"):
        checked_order(order(), LIES[lie], 2, 20)


def test_a_device_is_no_place_for_a_message() -> None:
    built = TrainerBuilt(TrainerFacts(Layout(("w",), ((2,),)), "", (), None, "cuda:0", 5, False), None)
    assert checked_trainer(built) is built
    for lie in ({"device": "Meier, Anna; 1961"}, {"frozen": "zz"}, {"examples": -1}):
        with pytest.raises(RunError, match="impossible value"):
            checked_trainer(replace(built, facts=replace(built.facts, **lie)))
