"""Every side tuned over one grid on seeds apart, and what then comes out on fresh ones: `compare`.

A run while tuning ends at `PATIENCE` times the seconds of FedAvg as shipped, on the same machines with the same seed,
and one of the report at `LIMIT` times. A run that has not reached the target by then has missed it. While tuning, one
that cannot change what is chosen ends earlier, see `target_search`.

The work is cut to stages, each a strategy on all clusters in one task, so that what is done first is whole: `stages`.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bench.papers.target_cells import AUTO, FEDAVG, TASKS, Cell, Side, lockstep, machines, pooled, sets
from bench.papers.target_runs import BEYOND, Job, Result, Runner
from bench.papers.target_search import FIRST, Asked, Found, Point, Search, Seen, search

PATIENCE, LIMIT = 1.5, 4.0
INF = math.inf
BASE = Side(FEDAVG)
BALANCED = "lb-bsp"
"""Runs as shipped without overhead, too: what waiting alone costs."""
TUNING = 1000
"""First of the seeds by which sides are tuned."""
FRESH = 100
"""First of those that are reported. Not 0: momentum and local steps of ``auto`` were chosen on seeds 7 to 9."""
SEARCHED = 28
"""Runs of a search that prunes nothing and does not grow, for the estimate of what is left."""


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
    """The seconds of wanted runs of one task.

    Args:
        task: name.
        target: see `Learning`.
        runner: of all runs.
    """

    def __init__(self, task: str, target: float, runner: Runner) -> None:
        self.task, self.learning, self.failed = task, TASKS[task], dict[str, None]()
        self._target, self._runner = target, runner
        self._aims: dict[int, str] = {}
        self._base: dict[tuple[Cell, int], float] = {}

    def knows(self, cell: Cell, seed: int) -> bool:
        """Whether there was time for what the limits of runs rest on."""
        return (cell, seed) in self._base

    def cap_s(self, cell: Cell, seed: int, limit: float) -> float:
        """Seconds that a run gets: so many times those of FedAvg as shipped; of all its rounds if that missed."""
        return limit * self._base[cell, seed]

    def know(self, cells: Sequence[Cell], seeds: Iterable[int]) -> None:
        """Run FedAvg as shipped, and train pooled where targets rest on that."""
        seeds = list(seeds)
        self._aim(seeds)
        wanted = [
            Wanted(self.task, cell, BASE, None, seed)
            for cell in cells
            for seed in seeds
            if seed in self._aims and not self.knows(cell, seed)
        ]
        jobs = {each: self._lockstep(each) for each in wanted}
        what = f"{self.task}: FedAvg as shipped"
        results = self._runner.run(what, dict.fromkeys((job for pair in jobs.values() for job in pair), INF))
        for each, (train, clock) in jobs.items():
            if train in results and clock in results:
                at_s = results[clock]["at_s"]
                self._base[each.cell, each.seed] = at_s[(results[train]["round"] or len(at_s)) - 1]

    def seconds(self, what: str, wanted: Mapping[Wanted, float], limit: float) -> dict[Wanted, Seen]:
        """Seconds to the target, as far as they matter, and of those for which there was time.

        Infinite where the target was missed within ``limit`` times FedAvg's as shipped.

        Args:
            what: for people.
            wanted: and up to which seconds each one matters.
            limit: see above.
        """
        caps = {each: self.cap_s(each.cell, each.seed, limit) for each in wanted if self.knows(each.cell, each.seed)}
        pairs = {each: self._lockstep(each) for each in caps if lockstep(each.side, each.cell)}
        what = f"{self.task}: {what}"
        clocks = self._runner.run(what, {clock: INF for _, clock in pairs.values()})
        jobs: dict[Wanted, Job] = {}
        asked: dict[Job, float] = {}
        for each, cap_s in caps.items():
            within = min(wanted[each], cap_s)
            if each not in pairs:
                jobs[each] = self._job(each, cap_s)
            elif pairs[each][1] in clocks:
                jobs[each], clock = pairs[each]
                within = bisect_right(clocks[clock]["at_s"], within)
            if each in jobs:
                # One training may be asked for by several clusters.
                asked[jobs[each]] = max(within, asked.get(jobs[each], 0.0))
        results = self._runner.run(what, asked)
        found: dict[Wanted, Seen] = {}
        for each, job in jobs.items():
            if job in results:
                self._note(each, results[job])
                at_s = clocks[pairs[each][1]]["at_s"] if each in pairs else None
                found[each] = _seen(results[job], at_s, wanted[each], caps[each])
        return found

    def _note(self, each: Wanted, result: Result) -> None:
        what = f"{self.task}, {each.side.name}, {each.cell}, {each.point}"
        if "failed" in result:
            self.failed[f"{what}: {result['failed']}"] = None
        elif result.get("failures") and lockstep(each.side, each.cell) and result["round"] is not None:
            # A round in which an order fails takes longer than the clock's.
            self.failed[f"{what}: {result['failures']} orders failed, which its seconds are without"] = None

    def _aim(self, seeds: Sequence[int]) -> None:
        """What the stop rules say of the target."""
        if not self.learning.pooled:
            self._aims |= dict.fromkeys(seeds, f"target_accuracy: {self._target}")
            return
        silos = self._silos(Cell("homogeneous", 0.0))
        jobs = {seed: Job("pooled", FEDAVG, pooled(self.task, seed), silos) for seed in seeds if seed not in self._aims}
        results = self._runner.run(f"{self.task}: pooled training", dict.fromkeys(jobs.values(), INF))
        for seed, job in jobs.items():
            if job in results:
                loss = (1 + self._target) * results[job]["loss"]
                self._aims[seed] = f"target: {{metric: loss, at_most: {loss!r}}}"

    def _job(self, each: Wanted, cap_s: float) -> Job:
        changes = sets(self.task, each.side, each.point, each.seed, each.cell.overhead_s)
        stop = f"stop={{seconds: {cap_s!r}, {self._aims[each.seed]}}}"
        return Job("seconds", each.side.file, (*changes, stop), self._silos(each.cell))

    def _lockstep(self, each: Wanted) -> tuple[Job, Job]:
        """Training, which is the same on all machines, and the seconds of its rounds on these ones."""
        changes, rounds = sets(self.task, each.side, each.point, each.seed), self.learning.rounds
        stop = f"stop={{rounds: {rounds}, {self._aims[each.seed]}}}"
        train = Job("rounds", FEDAVG, (*changes, stop), self._silos(Cell("homogeneous", 0.0)))
        # What is learned, and how, is none of the clock's: one for all rates and optimizers. On machines without noise
        # it is one for all seeds.
        timed = None if each.point is None else Point(each.point.tau, 0.1)
        config = machines(each.cell.cluster, self.learning.silos, each.cell.overhead_s)
        noisy = any(silo.jitter or silo.contention for silo in config.silos)
        alone = sets("digits", BASE, timed, each.seed if noisy else 0)
        return train, Job("clock", FEDAVG, (*alone, f"stop={{rounds: {rounds}}}"), self._silos(each.cell))

    def _silos(self, cell: Cell) -> str:
        return json.dumps(machines(cell.cluster, self.learning.silos, cell.overhead_s).entries())


def _seen(result: Result, at_s: Sequence[float] | None, within: float, cap_s: float) -> Seen:
    """What a result tells of a run that had ``cap_s``, up to ``within``; ``at_s``: ends of rounds, if it has those."""
    if BEYOND in result:
        return Seen(within, more=True) if within < cap_s else Seen(INF)
    seconds = result["seconds"]
    if at_s is not None and result["round"] is not None:
        seconds = at_s[result["round"] - 1]
    return Seen(seconds if seconds is not None and seconds <= cap_s else INF)


Key = tuple[Cell, Side]


def tune(
    course: Course,
    keys: Sequence[Key],
    seeds: Sequence[int],
    near: Mapping[Key, Point],
    *,
    small: bool,
) -> dict[Key, Found]:
    """The best point of each side in each cell, of those for which there was time; searches go on beside each other.

    Args:
        course: of the task.
        keys: cells and sides.
        seeds: the first is that of all points.
        near: what was best in a case that is like this one.
        small: see `search`.
    """
    # No version comes before its orders' overhead.
    going: dict[Key, Search] = {
        key: search(seeds, small=small, near=near.get(key, FIRST), least=max(key[0].overhead_s, 1e-3)) for key in keys
    }
    asked = {key: next(each) for key, each in going.items()}
    found: dict[Key, Found] = {}
    while asked:
        runs: dict[tuple[Key, Asked], Wanted] = {}
        within: dict[Wanted, float] = {}
        for key, questions in asked.items():
            for each, seconds in questions.items():
                runs[key, each] = Wanted(course.task, *key, *each)
                within[runs[key, each]] = seconds
        names = ", ".join(dict.fromkeys(side.name for _, side in asked))
        seen = course.seconds(f"tuning {names}", within, PATIENCE)
        answered = {
            key: {each: seen[runs[key, each]] for each in some if runs[key, each] in seen}
            for key, some in asked.items()
        }
        asked = {key: some for key, some in asked.items() if len(answered[key]) == len(some)}
        for key in list(asked):
            try:
                asked[key] = going[key].send(answered[key])
            except StopIteration as end:
                found[key] = end.value
                del asked[key]
    return found


@dataclass(frozen=True)
class Stage:
    """A strategy in one task on all clusters at one overhead.

    Args:
        task, strategy: names.
        cells: machines.
        tuned: with momentum and without, at the best points; otherwise as shipped.
    """

    task: str
    strategy: str
    cells: tuple[Cell, ...]
    tuned: bool

    @property
    def runs(self) -> int:
        """About how many at most; FedAvg's serve all clusters."""
        cells = 1 if self.strategy == FEDAVG else len(self.cells)
        return cells * (2 * (SEARCHED + 10) if self.tuned else 10)


def stages(
    tasks: Iterable[str], cells: Sequence[Cell], strategies: Sequence[str], *, waiting: bool = False
) -> list[Stage]:
    """All work in its order: by overhead, by task; FedAvg and ``auto`` first, what is shipped and not demanded last.

    With ``waiting`` it is what waiting alone costs, and nothing else.
    """
    if waiting:
        bare = tuple(dict.fromkeys(Cell(cell.cluster, 0.0) for cell in cells))
        return [Stage(task, each, bare, tuned=False) for task in tasks for each in (FEDAVG, BALANCED)]
    found: list[Stage] = []
    for overhead_s in dict.fromkeys(cell.overhead_s for cell in cells):
        here = tuple(cell for cell in cells if cell.overhead_s == overhead_s)
        bare = tuple(Cell(cell.cluster, 0.0) for cell in here)
        for task in tasks:
            found += [Stage(task, FEDAVG, here, tuned=True), Stage(task, FEDAVG, here, tuned=False)]
            found += [Stage(task, AUTO, here, tuned=False)] if AUTO in strategies else []
            for name in strategies:
                found += [Stage(task, name, here, tuned=True)] if name != AUTO else []
                if name == BALANCED:
                    found += [Stage(task, each, bare, tuned=False) for each in (FEDAVG, BALANCED)]
            found += [Stage(task, name, here, tuned=False) for name in strategies if name != AUTO]
    return list(dict.fromkeys(found))


def compare(
    runner: Runner,
    tasks: Mapping[str, float],
    cells: Sequence[Cell],
    strategies: Sequence[str],
    seeds: tuple[Sequence[int], Sequence[int]],
    *,
    small: bool = False,
    waiting: bool = False,
) -> Outcome:
    """Tune, and run with fresh seeds; what there was no time for is not in the outcome.

    Args:
        runner: of all runs.
        tasks: and their targets.
        cells: machines.
        strategies: to tune beside FedAvg; `AUTO` is not tuned.
        seeds: to tune by, and fresh.
        small: see `search`.
        waiting: see `stages`.
    """
    out, plan = Outcome(), stages(tasks, cells, strategies, waiting=waiting)
    courses = {task: Course(task, target, runner) for task, target in tasks.items()}
    runner.planned = sum(stage.runs for stage in plan)
    for stage in plan:
        runner.begin(stage.runs)
        course = courses[stage.task]
        course.know(stage.cells, (*(seeds[0] if stage.tuned else ()), *seeds[1]))
        _carry_out(course, stage, seeds, out, small=small)
    out.failed += [text for course in courses.values() for text in course.failed]
    return out


def _carry_out(
    course: Course, stage: Stage, seeds: tuple[Sequence[int], Sequence[int]], out: Outcome, *, small: bool
) -> None:
    """Do a stage and put down what came of it."""
    tuning, fresh = seeds
    points: dict[Key, Point | None] = {(cell, Side(stage.strategy)): None for cell in stage.cells}
    if stage.tuned:
        keys = [(cell, Side(stage.strategy, momentum)) for momentum in (False, True) for cell in stage.cells]
        near = {key: each.point for key in keys if (each := _like(out, course.task, key)) is not None}
        found = tune(course, keys, tuning, near, small=small)
        out.chosen |= {(course.task, *key): each for key, each in found.items()}
        points = {key: each.point for key, each in found.items()}
    wanted = {(key, seed): Wanted(course.task, *key, point, seed) for key, point in points.items() for seed in fresh}
    seen = course.seconds(f"fresh seeds, {stage.strategy}", dict.fromkeys(wanted.values(), INF), LIMIT)
    into = out.tuned if stage.tuned else out.untuned
    for key in points:
        if all(wanted[key, seed] in seen for seed in fresh):
            into[course.task, *key] = {seed: seen[wanted[key, seed]].seconds for seed in fresh}
            out.caps[course.task, key[0]] = {seed: course.cap_s(key[0], seed, LIMIT) for seed in fresh}


def _like(out: Outcome, task: str, key: Key) -> Found | None:
    """What was found in the case that is most like this one: the same side at another overhead, or FedAvg."""
    cell, side = key
    same = [
        found
        for (what, where, who), found in out.chosen.items()
        if (what, where.cluster, who) == (task, cell.cluster, side)
    ]
    return same[0] if same else out.chosen.get((task, cell, Side(FEDAVG, side.momentum)))
