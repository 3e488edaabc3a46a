"""A lying server that asks for survival sums: owners' floors, and the number of its questions."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fedsync.silo.protocol import Refusal, Refused
from tests.attacks.adversary import Federation
from tests.attacks.conftest import Make

GRID = {"every": 5.0, "until": 100.0}


Asking = Callable[..., Federation]


@pytest.fixture
def asking(make: Make) -> Asking:
    def made(grid: Any = GRID, **options: Any) -> Federation:
        weight = {"kind": "fedavg", "weight": "silo"}
        return make(
            3, **{"changes": {"task": task(make(3), grid), "aggregation": weight}, "run": "survival-1", **options}
        )

    return made


def task(federation: Federation, grid: Any = GRID, least: int = 5) -> dict[str, Any]:
    file = federation.table.with_name("followed.csv")
    rng = np.random.default_rng(1)
    frame = pd.DataFrame({"days": rng.integers(1, 100, 80), "dead": rng.integers(0, 2, 80), "age": rng.normal(size=80)})
    frame.to_csv(file, index=False)
    of = {"kind": "csv", "files": [str(file)] * 3, "target": "dead", "time": "days", "statistics": {"least": least}}
    return {"kind": "survey", "of": of, "survival": {"grid": grid, "covariates": ["age"], "steps": 2}}


PLAIN = {"cipher": {"kind": "plain"}}


@pytest.mark.parametrize(
    ("asked", "run", "owner", "allowed"),
    [
        # 61 times, and 60 is the default.
        ({"grid": {"every": 1.0, "until": 61.0}}, {}, {}, {"limits": {"times": 61}}),
        ({"least": 4}, {}, {}, {"limits": {"statistics": 4}}),
        ({}, PLAIN, {"keys": None}, {"keys": None, "statistics": "plain"}),
    ],
    ids=["a finer grid", "fewer persons in a cell", "in the clear"],
)
def test_what_the_owner_does_not_allow_is_refused(
    asked: dict[str, Any], run: dict[str, Any], owner: dict[str, Any], allowed: dict[str, Any], asking: Asking
) -> None:
    federation = asking()
    spec = federation.spec(task=task(federation, **asked), **run)
    assert federation.silo("silo-a", spec, **owner).refusal() is Refusal.OWNER
    assert federation.silo("silo-b", spec, **allowed).refusal() is None


def test_as_many_times_as_the_owner_allows_are_asked_and_sums_of_one_silo_are_not(asking: Asking) -> None:
    federation = asking()
    at_most = federation.spec(task=task(federation, {"every": 1.0, "until": 60.0}))
    assert federation.silo("silo-a", at_most).refusal() is None
    alone = federation.spec(cipher={"kind": "bfv", "members": 1})
    assert federation.silo("silo-b", alone).refusal() is Refusal.OWNER


def test_each_round_counts_as_a_question_of_any_run(asking: Asking) -> None:
    """Two grids, or two sets of covariates, can be subtracted."""
    federation = asking(owner={"limits": {"surveys_per_hour": 3}})
    for _ in range(3):
        federation.round()
    heard = federation.train("silo-a")
    assert isinstance(heard.reply, Refused) and heard.reply.code is Refusal.LIMIT
    again = asking({"every": 7.0, "until": 100.0}, owner={"limits": {"surveys_per_hour": 3}}, run="survival-2")
    heard = again.train("silo-a")
    assert isinstance(heard.reply, Refused) and heard.reply.code is Refusal.LIMIT
