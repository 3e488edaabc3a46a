"""The search of the map, and what is kept of its runs."""

import json
import math
import random
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from bench.papers.map_cells import Cell, Side, sets
from bench.papers.target_runs import BEYOND, Cache, Job, Result, Runner, carry_out
from bench.papers.target_search import RATES, TAUS, Asked, Axis, Found, Point, Seen, score, search
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
        first = seeds[: math.ceil(len(seeds) / 3)]
        ranked = sorted(points, key=lambda point: (score([seconds(point, seed) for seed in first]), point))
        kept = ranked[: math.ceil(len(points) / 4)]
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


FABRICATED = (1.0, 1.5, 2.0, 2.0000001, 4.0, 8.0, 8.0, 60.0, math.inf)
"""Ties, what is nearly one, and the target that is missed, which no bound may confuse."""


def fabricated(number: int) -> Seconds:
    """Seconds without any order, or those of a bowl somewhere with noise, failures and ties."""
    rng = random.Random(number)
    shape, chance = bowl(rng.choice(TAUS), rng.choice(RATES)), rng.choice((0.0, 0.1, 0.5, 0.9))
    coarse, wild = rng.choice((0.0, 0.5)), rng.random() < 0.3
    known: dict[Asked, float] = {}
    for asked in product([Point(*each) for each in product(TAUS, RATES)], (1, 2, 3, 4, 5)):
        value = 1 + shape(*asked) * math.exp(rng.gauss(0.0, 0.3))
        if coarse:
            value = math.ceil(value / coarse) * coarse
        known[asked] = rng.choice(FABRICATED) if wild else math.inf if rng.random() < chance else value
    return lambda point, seed: known[point, seed]


@pytest.mark.slow
def test_a_search_with_bounds_finds_what_one_without_does() -> None:
    """Point, score, and whether it is interior, whatever comes first and however tight the least seconds are."""
    whole, done = 0, 0
    for number in range(300):
        seconds = fabricated(number)
        near = Point(TAUS[number % len(TAUS)], RATES[number % len(RATES)])
        seeds = (1, 2, 3) if number % 3 else (1, 2, 3, 4, 5)
        found, answers = ended(seconds, seeds, near=near, least=1.0 if number % 2 else 1e-3)
        assert found == reference(seconds, seeds)
        whole += sum(min(seconds(*each), 60.0) for each in {each for each, _ in answers})
        done += sum(min(seen.seconds, 60.0) for _, seen in answers)
    assert done < whole  # bounds are of use, too


def test_a_point_that_misses_a_seed_is_worse_than_any_that_does_not() -> None:
    assert score([1.0, math.inf]) > score([100.0, 100.0])
    assert score([2.0, 8.0]) == (0, pytest.approx(math.log(4.0)))
    found, _ = ended(lambda point, seed: math.inf if point.tau == 5 and seed == 2 else bowl(5, 0.1)(point, seed))
    assert found.point != Point(5, 0.1)


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


def test_results_of_other_code_count_only_where_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "some.cache.jsonl"
    line = {"digest": job("seed=1").digest(), "code": "older", "result": {"seconds": 1.0}}
    path.write_text(json.dumps(line) + "\n")
    strict, loose = (Cache(path, resume=True, any_code=any_code) for any_code in (False, True))
    assert strict.get(line["digest"]) is None and strict.codes == {}
    assert loose.get(line["digest"]) == {"seconds": 1.0} and loose.codes == {"older": 1}


def test_a_run_that_was_given_up_is_made_again_only_where_more_of_it_matters(tmp_path: Path) -> None:
    path, asked = tmp_path / "some.cache.jsonl", list[float]()

    def do(each: Job, within: float) -> Result:
        asked.append(within)
        return {BEYOND: within} if within < 9.0 else {"seconds": 9.0}

    for within, runs in ((4.0, 1), (3.0, 1), (6.0, 2), (5.0, 2), (math.inf, 3), (2.0, 3)):
        found = Runner(Cache(path, resume=True), 1, do).run("some", {job(): within})[job()]
        assert (len(asked), found.get("seconds")) == (runs, 9.0 if runs == 3 else None)


def test_a_digest_is_of_the_whole_configuration_and_of_nothing_else() -> None:
    same = [job(), job("local.steps=20"), job("seed=7")]  # what the file says already
    assert len({each.digest() for each in same}) == 1
    others = [job("local.learning_rate=0.3"), job("seed=8"), Job("clock", "fedavg", (), SILOS)]
    others.append(Job("seconds", "fedavg", (), SILOS.replace("32.0", "33.0")))
    assert len({each.digest() for each in [*same, *others]}) == 5


@pytest.mark.slow
def test_a_run_that_is_given_up_is_the_beginning_of_the_whole_one() -> None:
    """Bounds at the version that reaches the target, and before it."""
    cell, side = Cell("contention", 1.0), Side("a-bsp")
    changes = (*sets("digits", side, cell, Point(1, 0.1), 5), "stop={seconds: 30, target_accuracy: 0.6}")
    each = Job("seconds", side.strategy, changes, json.dumps(cell.cluster(8).entries()))
    found = carry_out(each)
    assert found["round"] > 2 and len(found["trace"]) <= found["round"]
    assert carry_out(each, found["seconds"])["seconds"] == found["seconds"]
    given_up = carry_out(each, found["seconds"] / 2)
    assert given_up[BEYOND] == found["seconds"] / 2
    assert given_up["trace"] == found["trace"][: len(given_up["trace"])] != []


@pytest.mark.slow
def test_silos_that_would_find_the_same_score_a_version_once(tmp_path: Path) -> None:
    from bench.papers.target_evaluations import shared
    from fedsync.simulation.run import run_virtual
    from fedsync.train.loop import Trainer

    cell = Cell("3", 1.0)
    changes = sets("digits", Side("fedavg"), cell, Point(1, 0.1), 5)
    config = StrategyConfig.load("fedavg", [*changes, "stop={rounds: 3}"])
    cluster, alone, calls = cell.cluster(8), Trainer._evaluate, list[int]()

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
