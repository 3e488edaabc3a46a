"""`auto`, untuned, against the FedAvg whose local steps are the best in hindsight, and against its own best choice.

    python bench/papers/auto.py [--first 20] [--seeds 5] [--overhead 1] [--clusters one-slow] [--oracle] [--resume]

Virtual seconds to the target, with real training, at `auto`'s learning rate. FedAvg runs with 1 to 32 local steps, and
of these the number counts that is best on the very seeds of the report. ``--oracle`` runs the strategy file of `auto`
without its section ``auto``: each barrier that it may choose, with balanced batches and several numbers of steps, from
the beginning to the end. The best of these, in hindsight too, is what a tuner that knows all could come to without
changes. All of them run with the first seed, and the best quarter with the others.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.common import print_table, write_json
from bench.papers.target_cells import AUTO, CLUSTERS, FEDAVG, TASKS, machines
from bench.papers.target_runs import Cache, Job, Result, Runner, carry_out
from bench.papers.target_search import score
from bench.papers.target_tables import compared
from fedsync.config.strategy import StrategyConfig

STEPS = (1, 2, 4, 8, 16, 32)
FIXED_STEPS = (1, 2, 4, 8)
FIXED = {
    "bsp": "{kind: bsp}",
    "a-bsp": "{kind: a-bsp}",
    "overlap": "{kind: overlap, carry: 0.25, inner: {kind: bsp}}",
}
ACCURACY = [name for name, task in TASKS.items() if not task.pooled]
"""Tasks with a target that is an accuracy."""
LONGEST_S = 240.0
ROUNDS = 150

Seconds = dict[int, float]
"""To the target, by seed; infinite where it was missed."""


@dataclass(frozen=True, order=True)
class Fixed:
    """A choice that stays as it is."""

    steps: int
    barrier: str


def one_run(job: Job, within: float) -> Result:
    """As `carry_out`; of a run of `auto` also when it changed what, and the share of time in which silos computed."""
    if job.strategy != AUTO:
        return carry_out(job, within)
    # Imported where used: torch takes seconds, and the process that hands out the runs does not need it.
    from bench.papers.target_evaluations import shared
    from fedsync.core.actions import Note
    from fedsync.core.journal import read_journal
    from fedsync.sim.run import run_virtual

    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, shared():
        summary = run_virtual(job.config(), job.cluster(), Path(folder))
        changes = [
            (entry.at_s, action.text.partition(" instead")[0].removeprefix("auto: "))
            for entry in read_journal(Path(folder) / "journal.jsonl")[1]
            for action in entry.actions
            if isinstance(action, Note) and action.text.startswith("auto: ")
        ]
    kept = {key: summary[key] for key in ("utilisation", "rounds")}
    return {"seconds": summary["seconds_to_target"], **kept, "changes": changes, "wall_s": time.perf_counter() - began}


class Study:
    """All runs of one task."""

    def __init__(self, runner: Runner, task: str, options: argparse.Namespace) -> None:
        self.seeds = range(options.first, options.first + options.seeds)
        self.rate = StrategyConfig.load(AUTO).local.learning_rate
        self._runner, self._task, self._overhead_s = runner, task, options.overhead
        self._target = TASKS[task].target

    def auto(self, cluster: str) -> dict[int, Result]:
        jobs = {seed: self._job(cluster, seed) for seed in self.seeds}
        return self._results(f"auto, {cluster}", jobs)

    def fedavg(self, clusters: Sequence[str]) -> dict[str, dict[int, Seconds]]:
        """By cluster and steps. Its course in rounds is the same on all machines, so it trains once."""
        trains: dict[tuple[int, int], Job] = {}
        clocks: dict[tuple[str, int, int], Job] = {}
        for steps, seed in product(STEPS, self.seeds):
            same = (f"seed={seed}", f"local.steps={steps}", f"local.learning_rate={self.rate}")
            stop = f"stop={{rounds: {ROUNDS}, target_accuracy: {self._target}}}"
            trains[steps, seed] = Job(
                "rounds", FEDAVG, (*same, f"task={TASKS[self._task].task}", stop), self._silos("homogeneous", 0.0)
            )
            for cluster in clusters:
                silos = self._silos(cluster, self._overhead_s)
                clocks[cluster, steps, seed] = Job("clock", FEDAVG, (*same, f"stop={{rounds: {ROUNDS}}}"), silos)
        found = self._runner.run(f"{self._task}: fedavg", dict.fromkeys([*trains.values(), *clocks.values()], math.inf))
        out: dict[str, dict[int, Seconds]] = {cluster: {steps: {} for steps in STEPS} for cluster in clusters}
        for (cluster, steps, seed), clock in clocks.items():
            number = found[trains[steps, seed]]["round"]
            out[cluster][steps][seed] = math.inf if number is None else found[clock]["at_s"][number - 1]
        return out

    def fixed(self, cluster: str) -> dict[Fixed, Seconds]:
        """Of the choices that ran with all seeds."""
        every = [Fixed(steps, barrier) for steps, barrier in product(FIXED_STEPS, FIXED)]
        first, rest = self.seeds[:1], self.seeds[1:]
        found = self._seconds(cluster, every, first)
        kept = sorted(every, key=lambda each: score(list(found[each].values())))[: math.ceil(len(every) / 4)]
        more = self._seconds(cluster, kept, rest)
        return {each: {**found[each], **more[each]} for each in kept}

    def _seconds(self, cluster: str, choices: Sequence[Fixed], seeds: Sequence[int]) -> dict[Fixed, Seconds]:
        jobs = {
            (choice, seed): self._job(
                cluster,
                seed,
                "auto=null",
                f"local.steps={choice.steps}",
                "balancer={kind: proportional}",
                f"barrier={FIXED[choice.barrier]}",
            )
            for choice, seed in product(choices, seeds)
        }
        done = self._results(f"fixed, {cluster}", jobs)
        return {choice: {seed: seconds(done[choice, seed]) for seed in seeds} for choice in choices}

    def _job(self, cluster: str, seed: int, *sets: str) -> Job:
        stop = f"stop={{seconds: {LONGEST_S}, target_accuracy: {self._target}}}"
        task = f"task={TASKS[self._task].task}"
        return Job("train", AUTO, (*sets, f"seed={seed}", task, stop), self._silos(cluster, self._overhead_s))

    def _results(self, what: str, jobs: Mapping[Any, Job]) -> dict[Any, Result]:
        found = self._runner.run(f"{self._task}: {what}", dict.fromkeys(jobs.values(), math.inf))
        return {key: found[job] for key, job in jobs.items()}

    def _silos(self, cluster: str, overhead_s: float) -> str:
        return json.dumps(machines(cluster, TASKS[self._task].silos, overhead_s).entries())


def seconds(result: Result) -> float:
    return math.inf if result["seconds"] is None else float(result["seconds"])


def ratio(mine: Seconds, base: Seconds) -> str:
    """Geometric mean over seeds, with a 95 % interval; who missed counts with all the time there was."""
    return str(compared([mine], [base], [dict.fromkeys(base, LONGEST_S)]))


def report(study: Study, clusters: Sequence[str], *, oracle: bool) -> list[dict[str, Any]]:
    """A row of the tables for each cluster."""
    rows, fedavg = [], study.fedavg(clusters)
    for cluster in clusters:
        results = study.auto(cluster)
        mine = {seed: seconds(result) for seed, result in results.items()}
        steps, base = min(fedavg[cluster].items(), key=lambda each: score(list(each[1].values())))
        row: dict[str, Any] = {"cluster": cluster, "auto over fedavg": ratio(mine, base), "fedavg's steps": steps}
        row |= {"fedavg [s]": f"{fmean(base.values()):.1f}", "auto [s]": f"{fmean(mine.values()):.1f}"}
        row["auto computes"] = f"{fmean(result['utilisation'] for result in results.values()):.0%}"
        if oracle:
            found = study.fixed(cluster)
            best, told = min(found.items(), key=lambda each: score(list(each[1].values())))
            row |= {"best fixed": f"{best.steps}, {best.barrier}", "best fixed over fedavg": ratio(told, base)}
        rows.append(row)
        for seed, result in results.items():
            changes = "; ".join(f"{at_s:.1f} s: {choice}" for at_s, choice in result["changes"])
            print(f"{cluster}, seed {seed}, {mine[seed]:.1f} s, {result['rounds']} rounds: {changes or 'no change'}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=20, help="first seed; momentum and all else were chosen on 7 to 9")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--overhead", type=float, default=1.0, help="of an order besides training [s]")
    parser.add_argument("--clusters", nargs="+", choices=CLUSTERS, default=list(CLUSTERS))
    parser.add_argument("--tasks", nargs="+", choices=ACCURACY, default=["digits"])
    parser.add_argument("--oracle", action="store_true", help="the best fixed choice, too")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one seed, one cluster")
    parser.add_argument("--resume", action="store_true", help="go on with a run that was cut off")
    parser.add_argument("--out", type=Path, default=Path("bench/results/auto.json"))
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.clusters = 1, ["one-to-three"]
    runner = Runner(Cache(options.out.with_suffix(".cache.jsonl"), resume=options.resume), options.processes, one_run)
    tables: dict[str, list[dict[str, Any]]] = {}
    try:
        for task in options.tasks:
            tables[task] = report(Study(runner, task, options), options.clusters, oracle=options.oracle)
    finally:
        runner.close()
    for task, rows in tables.items():
        first, last = options.first, options.first + options.seeds - 1
        title = f"{task}, {options.overhead:g} s an order, seeds {first} to {last}: ratio of seconds to the target"
        print_table(title, list(rows[0]), [list(row.values()) for row in rows])
    write_json(options.out, tables)


if __name__ == "__main__":
    main()
