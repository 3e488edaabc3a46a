"""Every side tuned over one grid on seeds apart, and what then comes out on fresh ones: `compare`.

A run while tuning ends at `PATIENCE` times the seconds of FedAvg as shipped, on the same machines with the same seed,
and one of the report at `LIMIT` times. A run that has not reached the target by then has missed it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bench.papers.target_cells import AUTO, FEDAVG, TASKS, Cell, Side, machines, sets
from bench.papers.target_runs import Job, Result, Runner
from bench.papers.target_search import Asked, Found, Point, Search, search

ROUNDS = 400
"""After which FedAvg has missed the target, at the latest."""
PATIENCE, LIMIT = 1.5, 4.0
INF = float("inf")
BASE = Side(FEDAVG)
BALANCED = "lb-bsp"
"""Runs as shipped without overhead, too: what waiting alone costs."""
TUNING = 1000
"""First of the seeds by which sides are tuned; fresh ones begin with 0."""

Chosen = dict[tuple[Cell, Side], Found]


@dataclass(frozen=True)
class Wanted:
    """A run: a side with a point, or as shipped without one, on machines with a seed."""

    task: str
    cell: Cell
    side: Side
    point: Point | None
    seed: int


@dataclass
class Outcome:
    """All that came out.

    Args:
        chosen: point of each task, cell and side.
        tuned: seconds by seed of each task, cell and side at its point; infinite where the target was missed.
        untuned: likewise of what is shipped.
        caps: what a run that missed counts with, by task, cell and seed: the seconds it was given [s].
        failed: what runs that came to no end said.
    """

    chosen: dict[tuple[str, Cell, Side], Found] = field(default_factory=dict)
    tuned: dict[tuple[str, Cell, Side], dict[int, float]] = field(default_factory=dict)
    untuned: dict[tuple[str, Cell, Side], dict[int, float]] = field(default_factory=dict)
    caps: dict[tuple[str, Cell], dict[int, float]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)


class Course:
    """The seconds of wanted runs of one task."""

    def __init__(self, task: str, runner: Runner, target: float) -> None:
        self.task, self.failed = task, dict[str, None]()
        self._runner, self._target = runner, target
        self._base: dict[tuple[Cell, int], float] = {}

    def base_s(self, cell: Cell, seed: int) -> float:
        """Seconds of FedAvg as shipped, on which the limits of all runs rest; those of all its rounds if it missed."""
        return self._base[cell, seed]

    def know(self, cells: Sequence[Cell], seeds: Iterable[int]) -> None:
        """Run FedAvg as shipped."""
        wanted = [Wanted(self.task, cell, BASE, None, seed) for cell in cells for seed in seeds]
        jobs = {each: self._lockstep(each) for each in wanted}
        results = self._runner.run(f"{self.task}: FedAvg as shipped", [job for pair in jobs.values() for job in pair])
        for each, (train, clock) in jobs.items():
            at_s = results[clock]["at_s"]
            self._base[each.cell, each.seed] = at_s[(results[train]["round"] or len(at_s)) - 1]

    def seconds(self, what: str, wanted: Sequence[Wanted], limit: float) -> dict[Wanted, float]:
        """Seconds to the target, infinite where it was missed within ``limit`` times FedAvg's as shipped."""
        jobs = {each: self._jobs(each, limit) for each in dict.fromkeys(wanted)}
        results = self._runner.run(f"{self.task}: {what}", [job for some in jobs.values() for job in some])
        found: dict[Wanted, float] = {}
        for each, some in jobs.items():
            train = results[some[0]]
            if "failed" in train:
                self.failed[f"{self.task}, {each.side.name}, {each.cell}, {each.point}: {train['failed']}"] = None
            seconds = _seconds([results[job] for job in some])
            found[each] = seconds if seconds <= limit * self.base_s(each.cell, each.seed) else INF
        return found

    def _jobs(self, each: Wanted, limit: float) -> tuple[Job, ...]:
        if each.side.strategy == FEDAVG:
            return self._lockstep(each)
        changes = sets(self.task, each.side, each.point, each.seed, each.cell.overhead_s)
        given_s = limit * self.base_s(each.cell, each.seed)
        stop = f"stop={{seconds: {given_s!r}, target_accuracy: {self._target}}}"
        return (Job("train", each.side.strategy, (*changes, stop), self._silos(each.cell)),)

    def _lockstep(self, each: Wanted) -> tuple[Job, Job]:
        """Training, which is the same on all machines, and the seconds of its rounds on these ones."""
        changes = sets(self.task, each.side, each.point, each.seed)
        stop = f"stop={{rounds: {ROUNDS}, target_accuracy: {self._target}}}"
        train = Job("train", FEDAVG, (*changes, stop), self._silos(Cell("homogeneous", 0.0)))
        # What is learned, and how, is none of the clock's: one for all rates and optimizers.
        timed = None if each.point is None else Point(each.point.tau, 0.1)
        alone = sets("digits", BASE, timed, each.seed)
        return train, Job("clock", FEDAVG, (*alone, f"stop={{rounds: {ROUNDS}}}"), self._silos(each.cell))

    def _silos(self, cell: Cell) -> str:
        return json.dumps(machines(cell.cluster, TASKS[self.task].silos, cell.overhead_s).entries())


def _seconds(results: Sequence[Result]) -> float:
    if len(results) == 1:
        seconds = results[0]["seconds"]
        return INF if seconds is None else float(seconds)
    train, clock = results
    # Version 0 that is at the target already would be no run at all; targets lie above.
    return INF if train["round"] is None else float(clock["at_s"][train["round"] - 1])


def tune(course: Course, cells: Sequence[Cell], sides: Sequence[Side], seeds: Sequence[int], *, small: bool) -> Chosen:
    """The best point of each side in each cell; all searches go on beside each other."""
    going: dict[tuple[Cell, Side], Search] = {
        (cell, side): search(seeds, small=small) for cell in cells for side in sides
    }
    asked: dict[tuple[Cell, Side], list[Asked]] = {key: next(each) for key, each in going.items()}
    found: Chosen = {}
    step = 0
    while asked:
        step += 1
        runs = {
            key: {each: Wanted(course.task, key[0], key[1], *each) for each in questions}
            for key, questions in asked.items()
        }
        what = f"tuning, step {step}"
        seconds = course.seconds(what, [run for some in runs.values() for run in some.values()], PATIENCE)
        answers = {key: {each: seconds[run] for each, run in some.items()} for key, some in runs.items()}
        asked = {}
        for key, answer in answers.items():
            try:
                asked[key] = going[key].send(answer)
            except StopIteration as end:
                found[key] = end.value
    return found


def compare(
    runner: Runner,
    tasks: Mapping[str, float],
    cells: Sequence[Cell],
    strategies: Sequence[str],
    seeds: tuple[Sequence[int], Sequence[int]],
    *,
    small: bool = False,
) -> Outcome:
    """Tune, and run with fresh seeds.

    Args:
        runner: of all runs.
        tasks: and their targets.
        cells: machines.
        strategies: to tune beside FedAvg; `AUTO` is not tuned.
        seeds: to tune by, and fresh.
        small: see `search`.
    """
    out = Outcome()
    tuning, fresh = seeds
    sides = [Side(name, momentum) for name in (FEDAVG, *strategies) if name != AUTO for momentum in (False, True)]
    bare = list(dict.fromkeys(Cell(cell.cluster, 0.0) for cell in cells))
    for task, target in tasks.items():
        course = Course(task, runner, target)
        course.know([*cells, *bare], [*tuning, *fresh])
        found = tune(course, cells, sides, tuning, small=small)
        tuned = {(key, seed): Wanted(task, *key, each.point, seed) for key, each in found.items() for seed in fresh}
        shipped = [(cell, Side(name)) for cell in cells for name in (FEDAVG, *strategies)]
        shipped += [(cell, Side(name)) for cell in bare for name in (FEDAVG, BALANCED)]
        untuned = {(key, seed): Wanted(task, *key, None, seed) for key in shipped for seed in fresh}
        seconds = course.seconds("fresh seeds", [*tuned.values(), *untuned.values()], LIMIT)
        out.chosen |= {(task, *key): each for key, each in found.items()}
        for runs, into in ((tuned, out.tuned), (untuned, out.untuned)):
            for (key, seed), run in runs.items():
                into.setdefault((task, *key), {})[seed] = seconds[run]
        for cell in (*cells, *bare):
            out.caps[task, cell] = {seed: LIMIT * course.base_s(cell, seed) for seed in fresh}
        out.failed += course.failed
    return out
