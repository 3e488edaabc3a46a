"""The parts of the tuned time-to-target bench that decide: grid, pairing, intervals, and what is kept of runs."""

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from bench.papers.target_cells import CLUSTERS, TASKS, Cell, Side, machines, sets
from bench.papers.target_runs import Cache, Job, Result, Runner, carry_out
from bench.papers.target_search import RATES, Asked, Found, Point, score, search
from bench.papers.target_tables import Compared, Findings, compared
from bench.papers.target_tuned import BASE, Outcome
from fedsync.config.strategy import StrategyConfig

SILOS = json.dumps([{"name": "a", "speed": 96.0}, {"name": "b", "speed": 32.0}])


def ended(seconds: Callable[[Point, int], float], seeds: Iterable[int] = (1, 2, 3)) -> tuple[Found, list[Asked]]:
    """What a search comes to where the seconds are a function, and all that it asked for."""
    going, asked = search(list(seeds)), list[Asked]()
    wanted = next(going)
    while True:
        asked += wanted
        try:
            wanted = going.send({each: seconds(*each) for each in wanted})
        except StopIteration as end:
            found: Found = end.value
            return found, asked


def bowl(tau: float, rate: float) -> Callable[[Point, int], float]:
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
    found, asked = ended(bowl(optimum.tau, optimum.rate))
    assert (found.point, found.interior, found.tried) == (optimum, True, tried)
    assert len(set(asked)) == len(asked)
    assert {point for point, seed in asked if seed == 1} >= {Point(tau, 0.1) for tau in (1, 2, 5, 10, 20, 40)}


def test_an_optimum_at_the_ladders_end_is_not_called_interior() -> None:
    found, _ = ended(bowl(5, 1000.0))
    assert (found.point, found.interior) == (Point(5, RATES[-1]), False)


def test_a_quarter_of_the_grid_runs_with_the_other_seeds() -> None:
    _, asked = ended(bowl(5, 0.1))
    assert [sum(seed == each for _, seed in asked) for each in (1, 2, 3)] == [18, 5, 5]  # 18 / 4, rounded up


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
    return Job("train", "fedavg", changes, SILOS)


def test_a_run_is_done_once_and_one_that_was_cut_off_goes_on(tmp_path: Path) -> None:
    path, done = tmp_path / "some.cache.jsonl", list[Job]()

    def do(each: Job) -> Result:
        done.append(each)
        return {"failed": "no"} if "seed=3" in each.sets else {"seconds": float(len(done))}

    jobs = [job("seed=1"), job("seed=2"), job("seed=1"), job("seed=3")]
    first = Runner(Cache(path, resume=False), 1, do).run("some", jobs)
    assert len(done) == 3 and first[jobs[0]] == first[jobs[2]]
    with path.open("a") as file:
        file.write('{"digest": "cut o')
    assert Runner(Cache(path, resume=True), 1, do).run("some", jobs)[jobs[1]] == first[jobs[1]]
    assert done[3:] == [jobs[3]]  # what failed is tried again
    assert len(path.read_text().splitlines()) == 2
    Runner(Cache(path, resume=False), 1, do).run("some", jobs)
    assert len(done) == 7


def test_a_digest_is_of_the_whole_configuration_and_of_nothing_else() -> None:
    same = [job(), job("local.steps=20"), job("seed=7")]  # what the file says already
    assert len({each.digest() for each in same}) == 1
    others = [job("local.learning_rate=0.3"), job("seed=8"), Job("clock", "fedavg", (), SILOS)]
    others.append(Job("train", "fedavg", (), SILOS.replace("32.0", "33.0")))
    assert len({each.digest() for each in [*same, *others]}) == 5


def test_fedavg_in_rounds_is_the_same_on_all_machines_and_the_clock_tells_the_seconds() -> None:
    """Contention, jitter and overhead: the seconds of a run without training are those of the run with it."""
    point, stop = Point(2, 0.1), "stop={rounds: 4, target_accuracy: 0.2}"
    changes = sets("digits", BASE, point, 5)
    silos = [
        json.dumps(machines(cluster, 8, s).entries()) for cluster, s in (("homogeneous", 0.0), ("contention", 1.0))
    ]
    bare, real = (carry_out(Job("train", "fedavg", (*changes, stop), text)) for text in silos)
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


@pytest.mark.parametrize("strategy", ["fedavg", "lb-bsp", "a-bsp", "fsp", "lb-a-bsp", "lb-fsp"])
@pytest.mark.parametrize("task", TASKS)
def test_every_side_is_a_strategy(task: str, strategy: str) -> None:
    side = Side(strategy, momentum=True)
    config = StrategyConfig.load(strategy, sets(task, side, Point(10, 0.3), 4, 1.0))
    assert (config.local.steps, config.local.learning_rate, config.seed) == (10, 0.3, 4)
    assert config.server_optimizer is not None


def test_the_interval_of_a_timed_round_is_what_its_steps_take_and_the_overhead() -> None:
    interval = "barrier.interval={kind: fixed, interval_s: 2.6}"  # 1 s, and 10 steps of 32 samples at 200/s
    assert interval in sets("digits", Side("fsp"), Point(10, 0.3), 4, 1.0)
    assert not any("interval" in change for change in sets("digits", Side("fsp"), None, 4, 1.0))
