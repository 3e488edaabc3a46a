"""The parts of the map that decide: cells, replayed seconds, records, and what is shown of what was not computed."""

import json
import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from bench.papers.map_cells import (
    AUTO,
    BATCH,
    CAUTIOUS,
    FEDAVG,
    LOCAL,
    MACHINES,
    OPTIMIZERS,
    OURS,
    PLAIN,
    TASKS,
    Cell,
    Side,
    preset,
    sets,
)
from bench.papers.map_replay import ALIKE, Replay, Wanted
from bench.papers.map_search import FRESH, TUNING, Outcome, compare, sides_of, stages
from bench.papers.map_tables import Compared, compared, record
from bench.papers.target_runs import BEYOND, Cache, Job, Result, Runner, carry_out
from bench.papers.target_search import Found, Point, Seen
from fedsync.config.strategy import StrategyConfig

POINT = Point(2, 0.1)


def runner(path: Path) -> Runner:
    return Runner(Cache(path / "some.cache.jsonl", resume=True), 1)


@pytest.mark.parametrize("silos", [4, 8])
@pytest.mark.parametrize("machines", MACHINES)
def test_a_cell_has_the_spread_and_the_overhead_of_its_name(machines: str, silos: int) -> None:
    cell = Cell(machines, 0.3)
    entries = cell.cluster(silos).silos
    speeds = [each.speed for each in entries]
    assert len(speeds) == silos
    spread = {"one slow": 10.0, "contention": 1.0}.get(machines) or float(machines)
    assert max(speeds) / min(speeds) == pytest.approx(spread)
    slowest = min(speeds) * (0.3 if machines == "contention" else 1.0)
    step_s = BATCH / slowest
    assert all(each.overhead_s == pytest.approx(0.3 * step_s) for each in entries)
    assert (entries[0].contention is not None) == (machines == "contention")


def test_the_bound_is_that_of_perfect_balance() -> None:
    """By hand: speeds 100 to 300 balanced take 0.5 of a step of the slowest, and overhead is 0.1 of it."""
    assert Cell("3", 0.1).bound(8, 1) == pytest.approx(0.6 / 1.1)
    assert Cell("3", 0.1).bound(8, 5) == pytest.approx(2.6 / 5.1)
    assert Cell("1", 0.1).bound(8, 1) == pytest.approx(1.0)
    assert Cell("one slow", 1.0).bound(8, 1) == pytest.approx((20 * 8 / 1420 + 1) / 2)
    assert Cell("contention", 0.1).bound(8, 1) is None


@pytest.mark.parametrize("task", TASKS)
def test_every_side_is_a_strategy(task: str) -> None:
    for strategy, optimizer in product([FEDAVG, *OURS], OPTIMIZERS):
        changes = sets(task, Side(strategy, optimizer), Cell("3", 1.0), Point(1, 0.3), 4)
        config = StrategyConfig.load(strategy, changes)
        assert (config.local.steps, config.seed) == (1, 4)
        rate = getattr(config.server_optimizer, "rate", config.local.learning_rate)
        assert rate == 0.3 and (config.server_optimizer is None) == (optimizer == PLAIN or optimizer in LOCAL)
        assert (config.local.optimizer == "adam") == (optimizer == "local-adam")


def test_auto_is_lb_bsp_at_its_preset() -> None:
    cell = Cell("3", 1.0)
    same = StrategyConfig.load("lb-bsp", sets("digits", Side("lb-bsp", CAUTIOUS), cell, preset(), 4))
    auto = StrategyConfig.load(AUTO, sets("digits", Side(AUTO, CAUTIOUS), cell, preset(), 4))
    left_out = {"name", "stop"}
    assert same.model_dump(exclude=left_out) == auto.model_dump(exclude=left_out)


def test_the_interval_of_a_timed_round_is_what_its_steps_take_and_the_overhead() -> None:
    """By hand: 10 steps of 32 samples at 200/s are 1.6 s, and a step of the slowest, at 100/s, is 0.32 s."""
    cell = Cell("3", 1.0)
    assert "barrier.interval={kind: fixed, interval_s: 1.92}" in sets("digits", Side("fsp"), cell, Point(10, 0.3), 4)


def direct(each: Wanted, stop: str) -> Result:
    job = Job("seconds", each.side.strategy, (*sets("digits", each.side, each.cell, each.point, each.seed), stop), "")
    silos = json.dumps(each.cell.cluster(8).entries())
    return carry_out(Job(job.kind, job.strategy, job.sets, silos))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "trained", "replayed"),
    [
        (FEDAVG, Cell("1", 0.1), Cell("contention", 1.0)),
        (FEDAVG, Cell("3", 0.1), Cell("one slow", 3.0)),
        ("lb-bsp", Cell("3", 0.03), Cell("3", 0.1)),
        ("elastic", Cell("3", 0.1), Cell("3", 1.0)),
    ],
)
def test_replayed_seconds_are_those_of_a_run(tmp_path: Path, strategy: str, trained: Cell, replayed: Cell) -> None:
    replay = Replay("digits", 0.5, runner(tmp_path))
    assert replay.aim([5])
    one, other = (Wanted(cell, Side(strategy), POINT, 5) for cell in (trained, replayed))
    first = replay.seconds("some", {one: math.inf}, {})[one]
    second = replay.seconds("some", {other: math.inf}, {})[other]
    assert (replay.trained, replay.replayed) == (1, 1)
    stop = f"stop={{rounds: {TASKS['digits'].rounds}, target_accuracy: 0.5}}"
    for each, seen in ((one, first), (other, second)):
        found = direct(each, stop)
        assert (seen.seconds, seen.rounds) == (pytest.approx(found["seconds"], rel=1e-9), found["round"])


@pytest.mark.slow
def test_a_run_whose_silos_do_other_work_is_trained(tmp_path: Path) -> None:
    """Batch sizes follow speeds, and the first round ends early only where overhead is small."""
    replay = Replay("digits", 0.4, runner(tmp_path))
    assert replay.aim([5])
    cells = (Cell("1.5", 0.1), Cell("3", 0.1), Cell("3", 3.0))
    wanted = [Wanted(cell, Side("lb-bsp"), POINT, 5) for cell in cells]
    assert len(replay.seconds("some", dict.fromkeys(wanted, math.inf), {})) == 3
    assert (replay.trained, replay.replayed) == (3, 0)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ALIKE)
def test_on_equal_machines_it_does_what_fedavg_does(tmp_path: Path, strategy: str) -> None:
    """Versions, instants and the model, bit by bit: so FedAvg's training serves it, too."""
    from fedsync.simulation.run import run_virtual

    cell, found = Cell("1", 1.0), []
    for name in (FEDAVG, strategy):
        side, out = Side(name, CAUTIOUS), tmp_path / name
        changes = (*sets("heart", side, cell, POINT, 5), "stop={rounds: 4}")
        run_virtual(StrategyConfig.load(name, changes), cell.cluster(4), out)
        rows = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
        model = torch.load(out / "last.pt", weights_only=True)
        found.append(([(row["at_s"], row["test_loss"]) for row in rows], {k: v.tolist() for k, v in model.items()}))
    assert found[0] == found[1]


def test_ratios_are_paired_and_split_into_rounds_and_seconds_a_round() -> None:
    """By hand: ratios 1/2 and 2 have the mean 1; rounds double with both seeds."""
    base = {0: Seen(10.0, rounds=10), 1: Seen(40.0, rounds=10)}
    found = compared({1: Seen(80.0, rounds=20), 0: Seen(5.0, rounds=20)}, base, 99.0)
    assert found.ratio == pytest.approx(1.0) and (found.low, found.high) == (pytest.approx(0.5), pytest.approx(2.0))
    assert (found.rounds, found.round_s) == (pytest.approx(2.0), pytest.approx(0.5))
    with pytest.raises(ValueError, match="no pairs"):
        compared({0: Seen(1.0), 2: Seen(1.0)}, base, 9.0)


def test_an_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    import numpy as np

    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(60):
        mine = {s: Seen(float(each), rounds=1) for s, each in enumerate(0.5 * np.exp(rng.normal(0.0, 0.2, 10)))}
        found = compared(mine, dict.fromkeys(mine, Seen(1.0, rounds=1)), 9.0)
        assert found.low is not None and found.high is not None
        hits += found.low <= 0.5 <= found.high
    assert 48 <= hits <= 60  # a bootstrap of ten is a little narrow: about 90 %


def test_who_missed_counts_with_the_cap_and_is_named() -> None:
    base = {0: Seen(10.0, rounds=1), 1: Seen(10.0, rounds=1)}
    found = compared({0: Seen(math.inf), 1: Seen(5.0, rounds=1)}, base, 40.0)
    assert (found.ratio, found.missed, found.base_missed) == (pytest.approx(2.0**0.5), 1, 0)
    assert str(found).endswith("missed 1:0/2")
    one = compared({0: Seen(5.0, rounds=2)}, {0: Seen(10.0, rounds=1)}, 40.0)
    assert one == Compared(pytest.approx(0.5), None, None, pytest.approx(2.0), pytest.approx(0.25), 0, 0, 1)


def test_the_best_is_the_best_of_the_tuning_seeds() -> None:
    """On the fresh seeds the other one is faster by chance, which must not choose it."""
    cell, out = Cell("3", 0.1), Outcome()
    for name, tuning, seconds in ((FEDAVG, 2.0, 10.0), ("lb-bsp", 0.0, 9.0), ("fsp", 1.0, 3.0)):
        out.chosen["digits", cell, Side(name)] = Found(Point(1, 0.1), (0, tuning), True, 18)
        out.fresh["digits", cell, Side(name)] = {100: Seen(seconds, rounds=1)}
    out.caps["digits", cell, "none"] = 40.0
    found = record(out, "digits", cell, "none")
    assert found is not None and found.best == "lb-bsp" and found.sides["fsp"].ratio == pytest.approx(0.3)
    assert found.failings() == ["over 1.1 x bound"]  # 0.9 instead of 0.545
    assert record(out, "digits", Cell("3", 1.0), "none") is None
    alone = {key: seen for key, seen in out.fresh.items() if key[2].strategy == FEDAVG}
    assert record(replace(out, fresh=alone), "digits", cell, "none") is None  # nothing to compare with


def fabricated(job: Job, within: float) -> Result:
    """Seconds from a formula: each round takes a second, and the target comes after nine."""
    if job.kind == "clock":
        return {"at_s": [1.0 + at for at in range(400)], "trace": [str(at) for at in range(400)]}
    trace = [str(at) for at in range(9)]
    return {BEYOND: within, "trace": trace[: math.ceil(within)]} if within < 9 else {
        "round": 9, "seconds": 9.0, "trace": trace,
    }  # fmt: skip


def test_what_there_was_no_time_for_is_not_in_the_outcome(tmp_path: Path) -> None:
    path, seeds = tmp_path / "some.cache.jsonl", ((TUNING,), (FRESH, FRESH + 1))
    plan = stages(["digits"], ["3"], [0.1], sides_of(["lb-bsp"], ["none"]))
    first = compare(Runner(Cache(path, resume=False), 1, fabricated), plan, seeds, small=True)
    cell = Cell("3", 0.1)
    found = record(first, "digits", cell, "none")
    assert found is not None and found.sides["lb-bsp"].ratio == 1.0 and found.best == FEDAVG
    more = stages(["digits"], ["3", "10"], [0.1], sides_of(["lb-bsp"], ["none"]))
    late = compare(Runner(Cache(path, resume=True), 1, fabricated, until=0.0), more, seeds, small=True)
    assert record(late, "digits", cell, "none") == found
    assert record(late, "digits", Cell("10", 0.1), "none") is None
