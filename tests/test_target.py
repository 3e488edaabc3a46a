"""The parts of the tuned time-to-target bench that decide: grid, pairing, intervals, and what is kept of runs."""

import json
import math
import random
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.papers.target_cells import ALIKE, AUTO, CLUSTERS, OURS, TASKS, Cell, Side, lockstep, machines, sets
from bench.papers.target_runs import BEYOND, Cache, Job, Result, Runner, carry_out
from bench.papers.target_search import (
    RATES,
    TAUS,
    Asked,
    Axis,
    Found,
    Point,
    Score,
    Seen,
    score,
    search,
    worth,
)
from bench.papers.target_tables import Compared, Findings, compared
from bench.papers.target_tuned import BASE, Outcome, compare, stages
from fedsync.config.strategy import StrategyConfig
from fedsync.core.orders import Evaluation, Split

SILOS = json.dumps([{"name": "a", "speed": 96.0}, {"name": "b", "speed": 32.0}])


Seconds = Callable[[Point, int], float]


def ended(seconds: Seconds, seeds: Iterable[int] = (1, 2, 3), **how: Any) -> tuple[Found, list[tuple[Asked, Seen]]]:
    """What a search comes to where the seconds are a function, and all answers that it got."""
    going, answers = search(list(seeds), **how), list[tuple[Asked, Seen]]()
    wanted = next(going)
    while True:
        told = {each: within_reach(seconds(*each), within) for each, within in wanted.items()}
        answers += told.items()
        try:
            wanted = going.send(told)
        except StopIteration as end:
            found: Found = end.value
            return found, answers


def within_reach(seconds: float, within: float) -> Seen:
    """What a run tells that is given up after so many seconds."""
    return Seen(within, more=True) if seconds > within else Seen(seconds)


def reference(seconds: Seconds, seeds: Sequence[int]) -> Found:
    """The search as its file says it, all of whose runs go to the end."""
    tau, rate = Axis(TAUS, 1, 40, closed=True), Axis(RATES, 0.03, 0.3, closed=False)
    while True:
        points = [Point(int(steps), each) for steps in tau.values for each in rate.values]
        kept = sorted(points, key=lambda point: (seconds(point, seeds[0]), point))[: math.ceil(len(points) / 4)]
        scores = {point: score([seconds(point, seed) for seed in seeds]) for point in kept}
        best = min(kept, key=lambda point: (scores[point], point))
        interior = tau.inside(best.tau) and rate.inside(best.rate)
        if not any([tau.grow(best.tau), rate.grow(best.rate)]):
            return Found(best, scores[best], interior, len(points))


def bowl(tau: float, rate: float) -> Seconds:
    return lambda point, seed: math.exp(math.log(point.tau / tau) ** 2 + math.log(point.rate / rate) ** 2)


@pytest.mark.parametrize(
    ("optimum", "tried"),
    [
        (Point(5, 0.1), 6 * 3),  # inside from the beginning
        (Point(1, 0.1), 6 * 3),  # no fewer steps than one
        (Point(80, 0.1), 8 * 3),  # 80 once 40 was best, 160 once 80 was
        (Point(5, 0.01), 6 * 5),
        (Point(160, 1.0), 9 * 5),
    ],
)
def test_the_grid_grows_until_its_best_point_lies_inside(optimum: Point, tried: int) -> None:
    found, answers = ended(bowl(optimum.tau, optimum.rate))
    assert (found.point, found.interior, found.tried) == (optimum, True, tried)
    assert {point for (point, seed), _ in answers if seed == 1} >= {Point(tau, 0.1) for tau in (1, 2, 5, 10, 20, 40)}


def test_an_optimum_at_the_ladders_end_is_not_called_interior() -> None:
    found, _ = ended(bowl(5, 1000.0))
    assert (found.point, found.interior) == (Point(5, RATES[-1]), False)


def test_no_more_than_a_quarter_of_the_grid_runs_with_the_other_seeds() -> None:
    _, answers = ended(bowl(5, 0.1))
    counts = [len({point for (point, seed), _ in answers if seed == each}) for each in (1, 2, 3)]
    assert counts[0] == 18 and counts[2] <= counts[1] <= 5  # 18 / 4, rounded up


FABRICATED = (1.0, 1.5, 2.0, 2.0000001, 4.0, 8.0, 8.0, 60.0, math.inf)
"""Ties, what is nearly one, and the target that is missed, which no bound may confuse."""


def fabricated(number: int) -> Seconds:
    """Seconds without any order, or those of a bowl somewhere with noise, failures and ties."""
    rng = random.Random(number)
    shape, chance = bowl(rng.choice(TAUS), rng.choice(RATES)), rng.choice((0.0, 0.1, 0.5, 0.9))
    coarse, wild = rng.choice((0.0, 0.5)), rng.random() < 0.3
    known: dict[Asked, float] = {}
    for asked in product([Point(*each) for each in product(TAUS, RATES)], (1, 2, 3)):
        value = 1 + shape(*asked) * math.exp(rng.gauss(0.0, 0.3))
        if coarse:
            value = math.ceil(value / coarse) * coarse
        known[asked] = rng.choice(FABRICATED) if wild else math.inf if rng.random() < chance else value
    return lambda point, seed: known[point, seed]


def test_a_search_with_bounds_finds_what_one_without_does() -> None:
    """Point, score, and whether it is interior, whatever comes first and however tight the least seconds are."""
    whole, done = 0, 0
    for number in range(300):
        seconds = fabricated(number)
        near = Point(TAUS[number % len(TAUS)], RATES[number % len(RATES)])
        found, answers = ended(seconds, near=near, least=1.0 if number % 2 else 1e-3)
        assert found == reference(seconds, (1, 2, 3))
        whole += sum(min(seconds(*each), 60.0) for each in {each for each, _ in answers})
        done += sum(min(seen.seconds, 60.0) for _, seen in answers)
    assert done < whole  # bounds are of use, too


def test_what_cannot_win_is_given_up() -> None:
    """18 points; the five that are kept have 1 to 5 s, and 6 to 18 s are for nothing after the fifth second."""
    order = [Point(*each) for each in product((1, 2, 5, 10, 20, 40), (0.03, 0.1, 0.3))]
    order.sort(key=lambda point: (point != Point(5, 0.1), point))
    _, answers = ended(lambda point, seed: 1.0 + order.index(point) if point in order else 99.0, near=Point(1, 0.03))
    late = [seen for (point, seed), seen in answers if seed == 1 and order.index(point) > 12]
    assert late and all(seen.more and seen.seconds < 10.0 for seen in late)


@pytest.mark.parametrize(
    ("best", "seen", "left", "within"),
    [
        ((0, math.log(4.0)), [4.0, 4.0], 1, 4.0),  # the third to tie
        ((0, math.log(4.0)), [2.0, 4.0], 1, 8.0),
        ((0, math.log(4.0)), [4.0], 2, 16.0),  # the last may take one second
        ((1, math.log(4.0)), [math.inf, 2.0], 1, 8.0),  # the mean is of those that reached the target
        ((1, math.log(4.0)), [4.0, 9.0], 1, math.inf),  # however late, it misses fewer
        ((0, math.log(4.0)), [math.inf], 2, 0.0),
        ((3, math.inf), [math.inf, math.inf], 1, math.inf),
    ],
)
def test_how_long_a_seed_is_worth_waiting_for(best: Score, seen: list[float], left: int, within: float) -> None:
    assert worth(best, seen, left, least=1.0) == pytest.approx(within)


def test_a_point_that_misses_a_seed_is_worse_than_any_that_does_not() -> None:
    assert score([1.0, math.inf]) > score([100.0, 100.0])
    assert score([2.0, 8.0]) == (0, pytest.approx(math.log(4.0)))
    found, _ = ended(lambda point, seed: math.inf if point.tau == 5 and seed == 2 else bowl(5, 0.1)(point, seed))
    assert found.point != Point(5, 0.1)


def test_ratios_are_paired_by_seed_and_their_mean_is_geometric() -> None:
    """By hand: ratios 1/2 and 2 in one task and 1/2 twice in the other have the mean (1/2)^(2/4)."""
    base = [{0: 10.0, 1: 40.0}, {0: 4.0, 1: 4.0}]
    found = compared([{1: 80.0, 0: 5.0}, {0: 2.0, 1: 2.0}], base, [{0: 99.0, 1: 99.0}] * 2)
    assert found.ratio == pytest.approx(0.5**0.5)
    assert found.low == pytest.approx(0.5) and found.high == pytest.approx(1.0)  # of seed 0 alone, of seed 1 alone
    with pytest.raises(ValueError, match="no pairs"):
        compared([{0: 1.0, 2: 1.0}], [{0: 1.0, 1: 1.0}], [{0: 9.0, 1: 9.0, 2: 9.0}])


def test_an_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    import numpy as np

    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(60):
        mine = {seed: float(each) for seed, each in enumerate(0.5 * np.exp(rng.normal(0.0, 0.2, 10)))}
        found = compared([mine], [dict.fromkeys(mine, 1.0)], [dict.fromkeys(mine, 9.0)])
        assert found.low is not None and found.high is not None
        hits += found.low <= 0.5 <= found.high
    assert 48 <= hits <= 60  # a bootstrap of ten is a little narrow: about 90 %


def test_who_missed_counts_with_the_seconds_given_and_is_named() -> None:
    found = compared([{0: math.inf, 1: 5.0}], [{0: 10.0, 1: 10.0}], [{0: 40.0, 1: 40.0}])
    assert (found.ratio, found.missed, found.base_missed) == (pytest.approx(2.0**0.5), 1, 0)
    assert str(found).endswith("missed 1:0/2")
    assert compared([{0: 5.0}], [{0: 10.0}], [{0: 40.0}]) == Compared(pytest.approx(0.5), None, None, 0, 0, 1)


def test_the_best_is_the_best_of_the_tuning_seeds() -> None:
    """On the fresh seeds the other one is faster by chance, which must not choose it."""
    cell, one, other = Cell("one-to-three", 1.0), Side("a", True), Side("b", True)
    out = Outcome()
    for side, tuning, fresh in ((BASE, 0.0, 1.0), (one, 1.0, 9.0), (other, 2.0, 3.0)):
        out.chosen["digits", cell, side] = Found(Point(5, 0.1), (0, tuning), True, 18)
        out.tuned["digits", cell, side] = {0: fresh}
    assert Findings(out, ["digits"]).best(cell, momentum=True) == one


def job(*changes: str) -> Job:
    return Job("seconds", "fedavg", changes, SILOS)


def whole(*jobs: Job) -> dict[Job, float]:
    return dict.fromkeys(jobs, math.inf)


def test_a_run_is_done_once_and_one_that_was_cut_off_goes_on(tmp_path: Path) -> None:
    path, done = tmp_path / "some.cache.jsonl", list[Job]()

    def do(each: Job, within: float) -> Result:
        done.append(each)
        return {"failed": "no"} if "seed=3" in each.sets else {"seconds": float(len(done))}

    jobs = [job("seed=1"), job("seed=2"), job("seed=3")]
    runner = Runner(Cache(path, resume=False), 1, do)
    first = runner.run("some", whole(*jobs))
    assert len(done) == 3 and runner.run("some", whole(*jobs)) == first and len(done) == 3
    with path.open("a") as file:
        file.write('{"digest": "cut o')
    assert Runner(Cache(path, resume=True), 1, do).run("some", whole(*jobs))[jobs[1]] == first[jobs[1]]
    assert done[3:] == [jobs[2]]  # what failed is tried again
    assert len(path.read_text().splitlines()) == 2
    Runner(Cache(path, resume=False), 1, do).run("some", whole(*jobs))
    assert len(done) == 7


def test_a_run_that_was_given_up_is_made_again_only_where_more_of_it_matters(tmp_path: Path) -> None:
    path, asked = tmp_path / "some.cache.jsonl", list[float]()

    def do(each: Job, within: float) -> Result:
        asked.append(within)
        return {BEYOND: within} if within < 9.0 else {"seconds": 9.0}

    for within, runs in ((4.0, 1), (3.0, 1), (6.0, 2), (5.0, 2), (math.inf, 3), (2.0, 3)):
        found = Runner(Cache(path, resume=True), 1, do).run("some", {job(): within})[job()]
        assert (len(asked), found.get("seconds")) == (runs, 9.0 if runs == 3 else None)


def test_no_run_begins_when_time_is_over(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "some.cache.jsonl", resume=False)
    cache.put(job("seed=1").digest(), {"seconds": 1.0})
    found = Runner(cache, 1, until=0.0).run("some", whole(job("seed=1"), job("seed=2")))
    assert found == {job("seed=1"): {"seconds": 1.0}}


def test_a_digest_is_of_the_whole_configuration_and_of_nothing_else() -> None:
    same = [job(), job("local.steps=20"), job("seed=7")]  # what the file says already
    assert len({each.digest() for each in same}) == 1
    others = [job("local.learning_rate=0.3"), job("seed=8"), Job("clock", "fedavg", (), SILOS)]
    others.append(Job("seconds", "fedavg", (), SILOS.replace("32.0", "33.0")))
    assert len({each.digest() for each in [*same, *others]}) == 5


def test_fedavg_in_rounds_is_the_same_on_all_machines_and_the_clock_tells_the_seconds() -> None:
    """Contention, jitter and overhead: the seconds of a run without training are those of the run with it."""
    point, stop = Point(2, 0.1), "stop={rounds: 4, target_accuracy: 0.2}"
    changes = sets("digits", BASE, point, 5)
    silos = [
        json.dumps(machines(cluster, 8, s).entries()) for cluster, s in (("homogeneous", 0.0), ("contention", 1.0))
    ]
    bare, real = (carry_out(Job("rounds", "fedavg", (*changes, stop), text)) for text in silos)
    clock = carry_out(Job("clock", "fedavg", (*changes, "stop={rounds: 4}"), silos[1]))
    assert bare["round"] is not None and bare["round"] == real["round"]
    assert clock["at_s"][real["round"] - 1] == real["seconds"]


@pytest.mark.parametrize("silos", [8, 4])
def test_clusters_of_four_have_the_spread_of_those_of_eight(silos: int) -> None:
    speeds = {name: [silo.speed for silo in machines(name, silos, 0.2).silos] for name in CLUSTERS}
    assert {len(each) for each in speeds.values()} == {silos}
    assert {name: max(each) / min(each) for name, each in speeds.items()} == {
        "homogeneous": 1.0, "one-to-three": 3.0, "contention": 1.0, "one-slow": 10.0,
    }  # fmt: skip
    assert sum(speeds["one-to-three"]) / silos == 200.0
    of_four = machines("contention", silos, 0.2).silos
    assert all(silo.contention is not None and silo.jitter == 0.05 and silo.overhead_s == 0.2 for silo in of_four)


@pytest.mark.parametrize("strategy", ["fedavg", *OURS])
@pytest.mark.parametrize("task", TASKS)
def test_every_side_is_a_strategy(task: str, strategy: str) -> None:
    side = Side(strategy, momentum=True)
    config = StrategyConfig.load(side.file, sets(task, side, Point(10, 0.3), 4, 1.0))
    assert (config.local.steps, config.local.learning_rate, config.seed) == (10, 0.3, 4)
    assert config.server_optimizer is not None


def test_the_interval_of_a_timed_round_is_what_its_steps_take_and_the_overhead() -> None:
    interval = "barrier.interval={kind: fixed, interval_s: 2.6}"  # 1 s, and 10 steps of 32 samples at 200/s
    assert interval in sets("digits", Side("fsp"), Point(10, 0.3), 4, 1.0)
    assert not any("interval" in change for change in sets("digits", Side("fsp"), None, 4, 1.0))


def test_a_run_that_is_given_up_is_the_beginning_of_the_whole_one() -> None:
    """Bounds at the version that reaches the target, and before it, by time and by rounds."""
    changes = sets("digits", Side("lb-a-bsp"), Point(1, 0.1), 5, 1.0)
    silos = json.dumps(machines("contention", 8, 1.0).entries())
    by_time, by_round = (
        Job(kind, "lb-a-bsp", (*changes, "stop={seconds: 30, target_accuracy: 0.6}"), silos)
        for kind in ("seconds", "rounds")
    )
    found = carry_out(by_time)
    assert found["round"] > 2
    for each, reached in ((by_time, found["seconds"]), (by_round, found["round"])):
        assert carry_out(each, reached)["seconds"] == found["seconds"]
        assert carry_out(each, reached / 2)[BEYOND] == reached / 2


@pytest.mark.parametrize("strategy", ALIKE[1:])
def test_on_equal_machines_it_does_what_fedavg_does(tmp_path: Path, strategy: str) -> None:
    """Versions, instants and the model, bit by bit: so FedAvg's training serves it, too."""
    from fedsync.simulation.run import run_virtual

    cell, found = Cell("homogeneous", 1.0), []
    for name in (BASE.strategy, strategy):
        side, out = Side(name, momentum=True), tmp_path / name
        assert lockstep(side, cell) and lockstep(side, Cell("contention", 1.0)) == (side.strategy == BASE.strategy)
        changes = (*sets("heart", side, Point(2, 0.1), 5, 1.0), "stop={rounds: 4}")
        run_virtual(StrategyConfig.load(name, changes), machines(cell.cluster, 4, 1.0), out)
        rows = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
        model = torch.load(out / "last.pt", weights_only=True)
        found.append(([(row["at_s"], row["test_loss"]) for row in rows], {k: v.tolist() for k, v in model.items()}))
    assert found[0] == found[1]


def test_silos_that_would_find_the_same_score_a_version_once(tmp_path: Path) -> None:
    from bench.papers.target_evaluations import shared
    from fedsync.simulation.run import run_virtual
    from fedsync.train.loop import Trainer

    config = StrategyConfig.load("fedavg", [*sets("digits", BASE, Point(1, 0.1), 5), "stop={rounds: 3}"])
    cluster, alone, calls = machines("one-to-three", 8, 1.0), Trainer._evaluate, list[int]()

    def counted(self: Trainer, split: Split) -> Evaluation:
        calls.append(1)
        return alone(self, split)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_evaluate", counted)
        run_virtual(config, cluster, tmp_path / "alone")
        apart, calls[:] = len(calls), []
        with shared():
            run_virtual(config, cluster, tmp_path / "shared")
    assert apart - len(calls) == 4 * 7  # versions 0 to 3, eight silos
    for name in ("journal.jsonl", "rounds.jsonl", "summary.json"):
        assert (tmp_path / "alone" / name).read_bytes() == (tmp_path / "shared" / name).read_bytes()


def test_the_first_stages_are_those_of_which_most_is_demanded() -> None:
    cells = [Cell(cluster, overhead_s) for overhead_s in (1.0, 0.2) for cluster in CLUSTERS]
    found = stages(["digits", "heart"], cells, [AUTO, *OURS])
    assert [(each.task, each.strategy, each.tuned) for each in found[:6]] == [
        ("digits", "fedavg", True), ("digits", "fedavg", False), ("digits", "auto", False), ("digits", "lb-bsp", True),
        ("digits", "fedavg", False), ("digits", "lb-bsp", False),
    ]  # fmt: skip
    assert {cell.overhead_s for each in found[4:6] for cell in each.cells} == {0.0}
    assert len(set(found)) == len(found)
    last_dear = max(at for at, each in enumerate(found) if each.cells[0].overhead_s == 1.0)
    assert all(each.cells[0].overhead_s != 1.0 for each in found[last_dear + 1 :])


def test_what_waiting_costs_is_measured_alone() -> None:
    found = stages(["digits"], [Cell("contention", each) for each in (1.0, 0.2)], [AUTO, *OURS], waiting=True)
    assert [(each.strategy, each.cells, each.tuned) for each in found] == [
        (name, (Cell("contention", 0.0),), False) for name in ("fedavg", "lb-bsp")
    ]


def test_a_stage_for_which_there_is_no_time_is_not_in_the_outcome(tmp_path: Path) -> None:
    """Seconds from a formula: who is not cached by then is left out, and what is whole is there."""
    cells, seeds = [Cell("one-to-three", 1.0)], ((1000,), (100, 101))
    began = list[Job]()

    def do(each: Job, within: float) -> Result:
        began.append(each)
        if each.kind == "clock":
            return {"at_s": [1.0 + at for at in range(400)]}
        return {"round": 9, "seconds": 9.0}

    path = tmp_path / "some.cache.jsonl"
    compare(Runner(Cache(path, resume=False), 1, do), {"digits": 0.9}, cells, [AUTO], seeds, small=True)
    runs = len(began)
    late = Runner(Cache(path, resume=True), 1, do, until=0.0)
    out = compare(late, {"digits": 0.9}, cells, [AUTO, "lb-bsp"], seeds, small=True)
    assert len(began) == runs
    assert {side.name for _, _, side in out.tuned} == {"fedavg", "fedavg + momentum"}
    assert out.untuned["digits", cells[0], Side(AUTO)] == {100: 9.0, 101: 9.0}
    assert str(Findings(out, ["digits"]).demanded("one-to-three")[0][0]) == "1.00 (1.00-1.00)"
    assert Findings(out, ["digits"]).demanded("one-to-three")[1] == (None, "")
