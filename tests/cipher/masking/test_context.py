"""What masks are bound to: all of an order but what differs between silos by design, which is bounded instead."""

import dataclasses
from dataclasses import replace
from typing import Any

import pytest

from fedsync.cipher.masking.mask_round import OWN, mask_context
from fedsync.core.orders import Split, Subject, WorkOrder
from tests.cipher.make import order
from tests.cipher.masking.rounds import RUN, roster

OTHER: dict[str, Any] = {
    "learning_rate": 1e-30,
    "overrun": 0.5,
    "evaluate": False,
    "subject": Subject.BEST,
    "after": 1,
    "share": True,
    "split": Split.TEST,
    "config": '{"mix": 1}',
}


def context(of: WorkOrder) -> bytes:
    return mask_context(RUN, of, bytes(32), 0, roster())


def test_every_field_of_an_order_is_bound_or_is_a_silo_s_own() -> None:
    """A field that comes new is bound; one that is not to be bound has to be named, with the reason."""
    assert OTHER.keys() | OWN == {field.name for field in dataclasses.fields(WorkOrder)}


@pytest.mark.parametrize("field", OTHER)
def test_another_word_to_training_is_another_context(field: str) -> None:
    assert context(replace(order("a/1", 0), **{field: OTHER[field]})) != context(order("a/1", 0))


def test_whether_there_is_a_budget_is_bound() -> None:
    first = order("a/1", 0)
    assert context(replace(first, budget_s=1.0)) != context(first)
    assert context(replace(first, budget_s=1.0)) == context(replace(first, budget_s=2.0))
    own = replace(first, update_id="b/7", seed=9, batch_size=3, max_steps=9, round=4)
    assert context(own) == context(first)


def test_run_past_attempt_and_roster_are_bound() -> None:
    of, chain, silos = order("a/1", 0), bytes(32), roster()
    contexts = {
        context(of),
        mask_context(bytes(32), of, chain, 0, silos),
        mask_context(RUN, of, b"1" * 32, 0, silos),
        mask_context(RUN, of, chain, 1, silos),
        mask_context(RUN, of, chain, 0, replace(silos, digest=bytes(32))),
    }
    assert len(contexts) == 5
