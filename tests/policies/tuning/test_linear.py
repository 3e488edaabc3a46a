"""With which barrier a section `auto` has the run of a linear model begin, and where it goes from there."""

from dataclasses import replace
from typing import Any

import pytest

from fedsync.config.compatibility import barriers_of, queues, simulated
from fedsync.config.run_spec import RunSpec
from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Commit, Dispatch, Note
from fedsync.core.curve import Curve
from fedsync.policies.barrier.wrappers.overlap import Overlap
from fedsync.policies.tuning.tuner import AutoChoice
from tests.policies.tuning.test_tuner import ALIKE, MASKED, SEALED, overlapped, play
from tests.sim.fake import strategy

BLOBS: dict[str, Any] = {"kind": "blobs"}
LINEAR: dict[str, Any] = {"kind": "linear", "data": BLOBS}
CSV: dict[str, Any] = {"kind": "csv", "files": ["a.csv"], "target": "sick"}
BSP: dict[str, Any] = {"kind": "bsp"}


def linear(**sections: Any) -> StrategyConfig:
    """Like the shipped `auto`, with a linear model."""
    return strategy(
        **{
            "stop": {"rounds": 1000},
            "local": {"steps": 1, "batch_size": 32},
            "balancer": {"kind": "fixed"},
            "predictor": {"kind": "memoryless"},
            "aggregation": {"kind": "fednova"},
            "server_optimizer": {"kind": "cautious-adam"},
            "task": LINEAR,
            "auto": {},
            **sections,
        }
    )


def begins(config: StrategyConfig) -> bool:
    """Whether each silo has two orders at once from the beginning; the same says the plan that silos are sent."""
    run = play(config, 1, **ALIKE)
    begin = [action for entry in run.entries if entry.at_s == 0 for action in entry.actions]
    first = [action.silo for action in begin if isinstance(action, Dispatch)]
    queued = sorted(first) == sorted([*ALIKE, *ALIKE])
    assert queued or len(set(first)) == len(first)
    assert queued == isinstance(barriers_of(config)[0], Overlap)
    assert not queued or RunSpec.of(config, None, 4).queues
    return queued


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"task": {**LINEAR, "loss": "squared"}},
        {"task": CSV},
        {"barrier": {"kind": "capped", "cap_s": 60.0, "inner": BSP}},
        {"barrier": {"kind": "a-bsp"}},
        SEALED,
    ],
    ids=["logistic", "squared", "csv", "capped", "a-bsp", "sealed"],
)
def test_a_linear_model_begins_with_an_order_queued_at_each_silo(sections: dict[str, Any]) -> None:
    assert begins(linear(**sections))


@pytest.mark.parametrize(
    "sections",
    [
        {"task": {"kind": "digits"}},
        {"task": {**CSV, "model": "mlp"}},
        {"server_optimizer": {"kind": "fedadam"}},
        {"server_optimizer": None},
        {"auto": {"queue_linear": False}},
        {"auto": {"barriers": [BSP]}},
        {"auto": None},
        {"barrier": {"kind": "fraction", "share": 0.5, "inner": BSP}},
        {"barrier": {"kind": "fsp", "interval": {"kind": "fixed", "interval_s": 1.0}}},
        MASKED,
    ],
    ids=["deep", "csv deep", "adam", "plain", "not wanted", "named", "no auto", "fraction", "no rounds", "masks"],
)
def test_others_begin_with_the_barrier_of_the_strategy(sections: dict[str, Any]) -> None:
    assert not begins(linear(**sections))


def test_the_strategy_s_own_barrier_and_the_usual_ones_are_tried_besides() -> None:
    assert [each.kind for each in barriers_of(linear())] == ["overlap", "bsp", "a-bsp", "fsp"]
    both = barriers_of(linear(auto={"overlap": 0.25}))
    assert [each.kind for each in both] == ["overlap", "bsp", "a-bsp", "fsp", "overlap"]
    assert len(set(both)) == len(both)
    assert isinstance(both[0], Overlap)
    assert both[0].carry == 0.25


def test_it_stays_where_orders_cost_more_than_training_and_goes_where_they_do_not() -> None:
    """Training 0.16 s and overhead 1 s, or 0.1 s of overhead; steps stay at 1, and the balancer at none."""
    few: dict[str, Any] = {"most_steps": 1, "balancers": [{"kind": "fixed"}]}
    assert play(linear(auto=few), 12, **ALIKE).reasons == []
    cheap = {name: replace(curve, overhead_s=0.0) for name, curve in ALIKE.items()}
    run = play(linear(auto=few), 12, **cheap)
    assert overlapped(run) == [False]
    assert "1 steps, fixed, bsp instead of 1 steps, fixed, overlap around bsp" in run.reasons[0]


def test_a_new_choice_that_leaves_the_barrier_has_silos_go_on_by_its_sizes_and_none_stand_idle() -> None:
    """When the first updates are in, the second of d is not, which trains longest."""
    speeds = {"a": 300.0, "b": 200.0, "c": 150.0, "d": 100.0}
    run = play(linear(), 6, **{name: Curve(speed, overhead_s=1.0) for name, speed in speeds.items()})
    changed = next(entry for entry in run.entries if any(isinstance(action, Note) for action in entry.actions))
    assert "2 steps, proportional, overlap around bsp instead of 1 steps, fixed, overlap around bsp" in run.reasons[0]
    orders = {action.silo: action.order for action in changed.actions if isinstance(action, Dispatch)}
    assert sorted(orders) == ["a", "b", "c", "d"]
    assert {order.max_steps for order in orders.values()} == {2}
    assert [orders[name].batch_size for name in "abcd"] == [51, 34, 26, 17]
    commits = [entry.at_s for entry in run.entries if any(isinstance(action, Commit) for action in entry.actions)]
    assert commits[2] - commits[0] == pytest.approx(1.35, abs=0.01)  # that of an order: 1 s and 2 x 51 / 300 s


@pytest.mark.parametrize(
    ("before", "after", "stands"), [(0, 0, True), (1, 0, False), (0, 1, False), (1, 1, False), (2, 2, False)]
)
def test_a_barrier_is_asked_again_but_where_it_stays_and_queues(before: int, after: int, stands: bool) -> None:
    """Of overlap, bsp and a-bsp: a-bsp reckons with what its round is planned to do, and that has changed."""
    tuner = linear().policies(4).tuner
    assert tuner is not None
    old, new = (replace(tuner.init(), choice=AutoChoice(steps, 0, way)) for steps, way in ((1, before), (2, after)))
    assert tuner.goes_on(old, new) == stands


def test_flower_s_simulation_engine_gets_the_same_strategy_without_a_queue() -> None:
    config = simulated(linear())
    assert not queues(config)
    assert [each.kind for each in barriers_of(config)] == ["bsp", "a-bsp", "fsp"]
