"""Seconds to the target of many runs, from as few trainings as possible.

A training depends on the machines only through the work of the silos: which silo does how many steps on which batches
in which round. This is the trace of a run. A run without training gives the trace and the seconds of any machines in a
tenth of the time. If its trace equals that of a training run with the same settings and seed, both train alike.
So the rounds to the target are known, and the seconds are those of the run without training:

| strategy | one training serves |
|---|---|
| fedavg | all machines and overheads: every silo does the same work |
| lb-bsp, a-bsp, elastic | overheads at which decisions are the same, often all |
| lb-bsp, a-bsp on equal machines | nothing is trained: FedAvg's training serves |
| any under contention, except fedavg | one cell |

Nothing of this is assumed. Where traces differ, the run is trained.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from bench.papers.map_cells import BATCH, FEDAVG, TASKS, Cell, Side, pooled, sets
from bench.papers.target_runs import BEYOND, Job, Result, Runner
from bench.papers.target_search import Point, Seen

INF = math.inf
ALIKE = ("lb-bsp", "a-bsp")
"""Strategies that train as FedAvg does, bit by bit, where all silos do the same work: see ``tests/test_map.py``."""
CLOCKS = (30, 100, 400)
"""Rounds of the runs without training; the first number that suffices is used."""


@dataclass(frozen=True)
class Wanted:
    """A run: a side at a point, on machines, with a seed."""

    cell: Cell
    side: Side
    point: Point
    seed: int

    @property
    def training(self) -> tuple[str, Point, int]:
        """Settings that training depends on, besides strategy and machines."""
        return self.side.optimizer, self.point, self.seed


class Replay:
    """Runs of one task.

    Args:
        task: name.
        target: see `Learning`.
        runner: of all runs.
    """

    def __init__(self, task: str, target: float, runner: Runner) -> None:
        self.task, self.learning, self.failed = task, TASKS[task], dict[str, None]()
        self.trained = self.replayed = 0
        self._target, self._runner = target, runner
        self._aims: dict[int, str] = {}
        self._known: dict[tuple[str, Point, int], list[tuple[Wanted, Result]]] = {}

    def aim(self, seeds: Iterable[int]) -> bool:
        """Find what the stop rules say of the target; return False if there was no time."""
        seeds = [seed for seed in seeds if seed not in self._aims]
        if self.learning.metric == "accuracy":
            self._aims |= dict.fromkeys(seeds, f"target_accuracy: {self._target}")
        elif self.learning.metric == "loss":
            self._aims |= dict.fromkeys(seeds, f"target: {{metric: loss, at_most: {self._target!r}}}")
        else:
            silos = self._silos(Cell("1", 0.03))
            jobs = {seed: Job("pooled", FEDAVG, pooled(self.task, seed), silos) for seed in seeds}
            results = self._runner.run(f"{self.task}: pooled training", dict.fromkeys(jobs.values(), INF))
            for seed, job in jobs.items():
                if job in results:
                    loss = (1 + self._target) * results[job]["loss"]
                    self._aims[seed] = f"target: {{metric: loss, at_most: {loss!r}}}"
        return all(seed in self._aims for seed in seeds)

    def seconds(self, what: str, wanted: Mapping[Wanted, float], caps: Mapping[Cell, float]) -> dict[Wanted, Seen]:
        """Seconds to the target, as far as they matter, of those for which there was time.

        Args:
            what: for people.
            wanted: and up to which seconds each one matters.
            caps: seconds after which a run has missed the target, by cell.
        """
        what = f"{self.task}: {what}"
        left = {each: min(within, caps.get(each.cell, INF)) for each, within in wanted.items()}
        found: dict[Wanted, Seen] = {}
        while left:
            for each, within in list(left.items()):
                if (seen := self._known_of(each, within)) is not None:
                    found[each] = seen
                    del left[each]
            recorded = {e: r for e, s in left.items() if (r := self._runner.known(self._job(e), s)) is not None}
            for each, result in recorded.items():
                self._learn(each, result)
            if recorded:
                continue
            # One of each family trains: the one that takes the most rounds, so that it serves the others.
            first: dict[tuple[str, tuple[str, Point, int]], Wanted] = {}
            for each, _ in sorted(left.items(), key=_rounds, reverse=True):
                first.setdefault((each.side.strategy, each.training), each)
            jobs = {each: self._job(each) for each in first.values()}
            results = self._runner.run(what, {job: left[each] for each, job in jobs.items()})
            for family, each in first.items():
                if jobs[each] in results:
                    self._learn(each, results[jobs[each]])
                else:
                    left = {other: s for other, s in left.items() if (other.side.strategy, other.training) != family}
        return {each: _capped(seen, caps.get(each.cell, INF)) for each, seen in found.items()}

    def _known_of(self, each: Wanted, within: float) -> Seen | None:
        """Result of a run as trainings so far tell it, if that is all that matters."""
        for other, result in self._known.get(each.training, ()):
            if (other.cell, other.side) == (each.cell, each.side):
                seen: Seen | None = seen_of(result)
            elif other.side == each.side or (other.side.strategy == FEDAVG and each.side.strategy in ALIKE):
                seen = self._replayed(each, result)
            else:
                continue
            if seen is not None and seen.settles(within):
                self.replayed += other.cell != each.cell or other.side != each.side
                return seen
        return None

    def _replayed(self, each: Wanted, result: Result) -> Seen | None:
        """Seconds of a run whose training is known if its silos do the same work; None if they do not."""
        rounds = len(result.get("trace", ()))
        clock = self._clock(each, rounds) if rounds else None
        if clock is None or len(clock["trace"]) < rounds or clock["trace"][rounds - 1] != result["trace"][-1]:
            return None
        if BEYOND in result:
            return Seen(clock["at_s"][rounds - 1], more=True)
        if result["round"] is None:
            return Seen(INF)
        return Seen(clock["at_s"][rounds - 1], rounds=rounds) if rounds == result["round"] else None

    def _clock(self, each: Wanted, rounds: int) -> Result | None:
        """The run without training. Rates and optimizers do not change it, nor do seeds on machines without noise."""
        count = next(most for most in CLOCKS if most >= rounds)
        seed = each.seed if each.cell.noisy else 0
        changes = sets(self.task, Side(each.side.strategy), each.cell, Point(each.point.tau, 0.1), seed)
        silos = self._silos(each.cell)
        job = Job("clock", each.side.strategy, (*changes, f"stop={{rounds: {count}}}"), silos)
        return self._runner.run(f"{self.task}: seconds of rounds", {job: INF}).get(job)

    def _learn(self, each: Wanted, result: Result) -> None:
        self.trained += 1
        if "failed" in result:
            self.failed[f"{self.task}, {each.side}, {each.cell}, {each.point}: {result['failed']}"] = None
        self._known.setdefault(each.training, []).append((each, result))

    def _job(self, each: Wanted) -> Job:
        changes = sets(self.task, each.side, each.cell, each.point, each.seed)
        stop = f"stop={{rounds: {self.learning.rounds}, {self._aims[each.seed]}}}"
        return Job("seconds", each.side.strategy, (*changes, stop), self._silos(each.cell))

    def _silos(self, cell: Cell) -> str:
        return json.dumps(cell.cluster(self.learning.silos).entries())


def seen_of(result: Result) -> Seen:
    """Outcome of a run for the search: seconds and rounds to the target, or that it was missed or given up."""
    if BEYOND in result:
        return Seen(result[BEYOND], more=True)
    return Seen(INF) if result["round"] is None else Seen(result["seconds"], rounds=result["round"])


def _rounds(asked: tuple[Wanted, float]) -> float:
    """Most rounds that matter."""
    each, within = asked
    return within / (each.cell.overhead_s + each.point.tau * BATCH / each.cell.slowest)


def _capped(seen: Seen, cap_s: float) -> Seen:
    """Result, in which a run that takes longer than ``cap_s`` has missed the target."""
    return Seen(INF) if seen.seconds > cap_s or (seen.more and seen.seconds >= cap_s) else seen
