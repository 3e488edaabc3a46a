"""A lying server that asks for survival sums: owners' floors, and the number of its questions."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fedsync.silo.protocol import Describe, Refusal, Refused
from tests.attacks.adversary import Federation, Victim
from tests.attacks.conftest import Make

GRID = {"every": 5.0, "until": 100.0}


@pytest.fixture
def asking(make: Make) -> Callable[..., Federation]:
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


def refusal(victim: Victim) -> Refusal | None:
    reply = victim.ask(Describe()).reply
    return reply.code if isinstance(reply, Refused) else None


def test_a_grid_finer_than_the_owner_allows_is_refused(asking: Callable[..., Federation]) -> None:
    federation = asking()
    finer, at_most = (federation.spec(task=task(federation, {"every": 1.0, "until": until})) for until in (61.0, 60.0))
    assert refusal(federation.silo("silo-a", finer)) is Refusal.OWNER, "61 times, and 60 is the default"
    assert refusal(federation.silo("silo-b", finer, limits={"times": 61})) is None
    assert refusal(federation.silo("silo-c", at_most)) is None


def test_cells_of_fewer_persons_than_the_owner_allows_are_refused(asking: Callable[..., Federation]) -> None:
    federation = asking()
    smaller = federation.spec(task=task(federation, least=4))
    assert refusal(federation.silo("silo-a", smaller)) is Refusal.OWNER
    assert refusal(federation.silo("silo-b", smaller, limits={"statistics": 4})) is None


def test_in_the_clear_it_is_refused_unless_the_owner_allows_it(asking: Callable[..., Federation]) -> None:
    federation = asking()
    clear = federation.spec(cipher={"kind": "plain"})
    assert refusal(federation.silo("silo-a", clear, keys=None)) is Refusal.OWNER
    assert refusal(federation.silo("silo-b", clear, keys=None, statistics="plain")) is None
    alone = federation.spec(cipher={"kind": "bfv", "members": 1})
    assert refusal(federation.silo("silo-c", alone)) is Refusal.OWNER, "a sum of one silo"


def test_each_round_counts_as_a_question_of_any_run(asking: Callable[..., Federation]) -> None:
    """Two grids, or two sets of covariates, can be subtracted."""
    federation = asking(owner={"limits": {"surveys_per_hour": 3}})
    for _ in range(3):
        federation.round()
    heard = federation.train("silo-a")
    assert isinstance(heard.reply, Refused) and heard.reply.code is Refusal.LIMIT
    again = asking({"every": 7.0, "until": 100.0}, owner={"limits": {"surveys_per_hour": 3}}, run="survival-2")
    heard = again.train("silo-a")
    assert isinstance(heard.reply, Refused) and heard.reply.code is Refusal.LIMIT
