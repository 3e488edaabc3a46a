"""A lying server that says how many silos stand behind what is told: each owner's floors win over its word (S1)."""

from typing import Any

import pytest

from fedsync.silo.protocol import Describe, Refusal, Refused
from tests.attacks.conftest import Make
from tests.attacks.test_survey import WEIGHT, table

BFV, MASKED = "{kind: bfv, members: 2}", "{kind: masked, inner: {kind: bfv, members: 2, colluding: 1}, work_ratio: 4}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cipher", "changes", "place", "floor", "at"),
    [
        (BFV, {}, "seal", {"members": 3}, {"members": 2}),
        (BFV, {"quorum": 2}, "seal", {"quorum": 3}, {"quorum": 2}),
        (MASKED, {}, "seal", {"masks": True, "colluding": 2}, {"masks": True, "colluding": 1}),
        (MASKED, {}, "seal", {"masks": True, "work_ratio": 2.0}, {"masks": True, "work_ratio": 4.0}),
        (BFV, None, "limits", {"statistics": 10}, {"statistics": 5}),
    ],
    ids=["members", "quorum", "colluding", "work ratio", "cells of a survey"],
)
def test_a_run_below_the_owners_floor_is_refused_and_at_it_taken(
    cipher: str, changes: dict[str, Any] | None, place: str, floor: dict[str, Any], at: dict[str, Any], make: Make
) -> None:
    federation = make(5, cipher=cipher)
    survey = {"task": {"kind": "survey", "of": table(federation)}, "aggregation": WEIGHT}
    spec = federation.spec(**(survey if changes is None else changes))
    reply = federation.silo("silo-a", spec, **{place: floor}).ask(Describe()).reply
    assert isinstance(reply, Refused) and reply.code is Refusal.OWNER, "the server's number is below the owner's"
    assert not isinstance(federation.silo("silo-a", spec, **{place: at}).ask(Describe()).reply, Refused)
