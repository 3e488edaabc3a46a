"""Even batch sizes: seconds to the target of ``lb-bsp`` over FedAvg, by ``balancer.gradient_noise``.

A small batch has a noisy gradient, and the update of a slow silo counts as much as before. So balanced batches may need
more rounds, which shorter rounds must make up for. The balancer weighs both (`fedsync.core.speed.evenness`).

Both sides do one step, at the rate that `map.py` found best for FedAvg in most of these cells. The first ten seeds are
those of the map. A run that misses the target counts with four times the slowest run of FedAvg.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from bench.common import in_parallel, print_table, write_json
from bench.papers.map_cells import BALANCED, FEDAVG, TASKS, Cell, Side, pooled, sets
from bench.papers.map_replay import seen_of
from bench.papers.map_search import FRESH, LIMIT
from bench.papers.map_tables import compared
from bench.papers.target_runs import Job, carry_out
from bench.papers.target_search import Point, Seen

POINTS = {"heart": Point(1, 1.0), "digits": Point(1, 0.1)}
NOISES = (0.0, 0.3)
CELLS = (
    *(Cell("10", overhead) for overhead in (0.1, 1.0, 3.0)),
    *(Cell("one slow", overhead) for overhead in (0.1, 3.0)),
    Cell("3", 3.0),
)

Run = tuple[str, Cell, float | None, int]
"""Task, cell, gradient noise and seed; noise None is FedAvg's."""


def goal(job: tuple[str, int]) -> str:
    """Rule that ends a run: an accuracy, or a loss slightly above that of pooled training."""
    task, seed = job
    learning = TASKS[task]
    if learning.metric == "accuracy":
        return f"stop={{rounds: 400, target_accuracy: {learning.target}}}"
    silos = json.dumps(CELLS[0].cluster(learning.silos).entries())
    loss = float(carry_out(Job("pooled", FEDAVG, pooled(task, seed), silos))["loss"]) * (1 + learning.target)
    return f"stop={{rounds: 400, target: {{metric: loss, at_most: {loss!r}}}}}"


def seen(run: tuple[Run, str]) -> Seen:
    """Seconds and rounds to the goal."""
    (task, cell, noise, seed), stop = run
    strategy = FEDAVG if noise is None else BALANCED
    changes = (*sets(task, Side(strategy), cell, POINTS[task], seed), stop)
    changes += () if noise is None else (f"balancer.gradient_noise={noise}",)
    silos = json.dumps(cell.cluster(TASKS[task].silos).entries())
    return seen_of(carry_out(Job("seconds", strategy, changes, silos)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=tuple(POINTS), default="heart")
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one cell, two seeds")
    parser.add_argument("--out", type=Path, default=Path("bench/results/even_batches.json"))
    options = parser.parse_args()
    task, cells, seeds = options.task, CELLS, range(FRESH, FRESH + options.seeds)
    if options.quick:
        cells, seeds = CELLS[:1], range(FRESH, FRESH + 2)
    stops = dict(zip(seeds, in_parallel(goal, [(task, seed) for seed in seeds], options.processes), strict=True))
    runs = [(task, cell, noise, seed) for cell in cells for noise in (None, *NOISES) for seed in seeds]
    found = dict(zip(runs, in_parallel(seen, [(run, stops[run[3]]) for run in runs], options.processes), strict=True))
    rows, records = [], []
    for cell in cells:
        base = {seed: found[task, cell, None, seed] for seed in seeds}
        cap_s = LIMIT * max(each.seconds for each in base.values() if math.isfinite(each.seconds))
        for noise in NOISES:
            ratio = str(compared({seed: found[task, cell, noise, seed] for seed in seeds}, base, cap_s))
            rows.append((cell.machines, f"{cell.overhead:g}", f"{noise:g}", ratio))
            records.append(
                {"machines": cell.machines, "overhead": cell.overhead, "gradient noise": noise, "ratio": ratio}
            )
    columns = ["speeds", "overhead", "gradient noise", "seconds = rounds x seconds a round"]
    print_table(f"lb-bsp over FedAvg, {task}", columns, rows)
    write_json(options.out, {"task": task, "records": records})


if __name__ == "__main__":
    main()
