"""Commits whose sum goes through a server optimizer before the model moves."""

from typing import Any

import numpy as np
import pytest

from fedsync.common.errors import PolicyError
from fedsync.core.actions import Commit
from fedsync.model.broadcast_compression import HeldModel
from fedsync.model.control_variates import ControlledModel, ControlVariates, key_of
from fedsync.model.plain_aggregator import PlainAggregator
from fedsync.model.plain_wire import Int8, Wire
from fedsync.model.server_optimizer import Adaptive, HeavyBall, ServerOptimizer
from tests.model.stores import delivered, vector


def stepping(*first: float, optimizer: ServerOptimizer | None = None, **options: Any) -> PlainAggregator:
    return PlainAggregator(vector(*first), optimizer=optimizer or HeavyBall(0.5, 1.0), **options)


def add(store: PlainAggregator, *values: float, version: int = 1) -> list[float]:
    store.put("a", "a/1", vector(*values))
    store.commit(Commit(version, {"a/1": 1.0}))
    return store.model.tolist()  # type: ignore[no-any-return]


def test_an_optimizer_steps_along_the_weighted_sum() -> None:
    """The sum is 0.25 x 4 + 0.75 x 8 = 7; m = 7, then 3.5 + 1."""
    store = stepping(1)
    store.put("a", "a/1", vector(4))
    store.put("b", "b/1", vector(8))
    store.commit(Commit(1, {"a/1": 0.25, "b/1": 0.75}))
    assert store.model.tolist() == [8]
    assert add(store, 1) == [12.5]


def test_updates_that_only_score_change_nothing_under_momentum() -> None:
    store = stepping(0, 0)
    before = add(store, 4, 8)
    assert add(store, 0, -0.0) == before
    assert add(store, 1, 0) == [before[0] + 1 + 2, before[1] + 4]


def test_a_rollback_takes_momentum_back_too() -> None:
    """At the savepoint m = 4; without it m would be 2 + 8 = 10, and 5 go on."""
    store = stepping(0)
    assert add(store, 4) == [4]
    store.savepoint()
    assert add(store, 8) == [4 + 10]
    store.rollback()
    assert store.model.tolist() == [4]
    assert add(store, 1) == [4 + 3]


def test_another_process_goes_on_with_the_moments() -> None:
    one, other = (stepping(0, 1, optimizer=Adaptive("adam", 0.1, 0.9, 0.99, 1e-3)) for _ in range(2))
    add(one, 3, 4)
    other.restore(one.state())
    assert add(one, 1, -2) == add(other, 1, -2)


def test_another_process_tells_silos_which_of_their_updates_counted() -> None:
    one, other = (stepping(0, optimizer=ControlVariates(1.0)) for _ in range(2))
    one.put("a", "a/1", vector(4))
    one.commit(Commit(1, {"a/1": 1.0}, steps=1.0, stands_for=1.0))
    other.restore(one.state())
    assert ControlledModel.decode(other.outgoing("a"), 1).counted == {key_of("a"): 1}


def test_an_older_update_makes_a_shorter_step_where_there_is_a_grace() -> None:
    """Of two versions since its base, one is granted: half the rate. What momentum keeps is whole: 4, then 2 + 4."""
    store = stepping(0, optimizer=HeavyBall(0.5, 1.0, grace=1))
    store.begin("late")
    for version in (1, 2):
        name = f"b/{version}"
        store.begin(name)
        store.put("b", name, vector(4 if version == 1 else 0))
        store.commit(Commit(version, {name: 1.0}))
    assert store.model.tolist() == [4]
    store.put("a", "late", vector(4))
    store.commit(Commit(3, {"late": 1.0}))
    assert store.model.tolist() == [4 + 6 / 2]


def test_the_public_model_follows_what_the_optimizer_made() -> None:
    store, silo = stepping(0, 0, wire=Wire(down=Int8())), HeldModel(2, Int8())
    for version in range(1, 5):
        add(store, 1, 1 / 300, version=version)
        found = delivered(store, silo, "a", version)
    exact = [sum(2 - 0.5**k for k in range(4)) * each for each in (1, 1 / 300)]
    np.testing.assert_allclose(found, exact, atol=0.02)
    np.testing.assert_allclose(store.state()["model"], exact, rtol=1e-6)


def test_a_commit_towards_whole_models_has_no_sum_to_step_along() -> None:
    store = stepping(0)
    store.begin("a/1")
    store.put("a", "a/1", vector(1))
    with pytest.raises(PolicyError, match="which makes no sum for a step"):
        store.commit(Commit(1, {"a/1": 1.0}, toward=True))
