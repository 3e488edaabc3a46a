"""Even batch sizes on the task heart: seconds to the target of ``lb-bsp`` over FedAvg, by ``balancer.gradient_noise``.

A small batch has a noisy gradient, and the update of a slow silo counts as much as before. So balanced batches may need
more rounds, which shorter rounds must make up for. The balancer weighs both (`fedsync.core.speed.evenness`).

Both sides do one step of rate 1, which is FedAvg's best setting in all of these cells of `map.py`, on the seeds that
the map reports and thirty more. A run that misses the target counts with four times the slowest run of FedAvg.
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

HEART = TASKS["heart"]
POINT = Point(1, 1.0)
NOISES = (0.0, 0.3)
CELLS = (
    *(Cell("10", overhead) for overhead in (0.1, 1.0, 3.0)),
    *(Cell("one slow", overhead) for overhead in (0.1, 3.0)),
    Cell("3", 3.0),
)

Run = tuple[Cell, float | None, int]
"""Cell, gradient noise and seed; noise None is FedAvg's."""


def aim(seed: int) -> float:
    """Loss that is to be reached: slightly above that of pooled training."""
    silos = json.dumps(CELLS[0].cluster(HEART.silos).entries())
    return float(carry_out(Job("pooled", FEDAVG, pooled("heart", seed), silos))["loss"]) * (1 + HEART.target)


def seen(run: tuple[Run, float]) -> Seen:
    """Seconds and rounds to a loss."""
    (cell, noise, seed), loss = run
    strategy = FEDAVG if noise is None else BALANCED
    stop = f"stop={{rounds: 400, target: {{metric: loss, at_most: {loss!r}}}}}"
    changes = (*sets("heart", Side(strategy), cell, POINT, seed), stop)
    changes += () if noise is None else (f"balancer.gradient_noise={noise}",)
    return seen_of(carry_out(Job("seconds", strategy, changes, json.dumps(cell.cluster(HEART.silos).entries()))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one cell, two seeds")
    parser.add_argument("--out", type=Path, default=Path("bench/results/even_batches.json"))
    options = parser.parse_args()
    cells, seeds = (CELLS[:1], range(FRESH, FRESH + 2)) if options.quick else (CELLS, range(FRESH, FRESH + 40))
    aims = dict(zip(seeds, in_parallel(aim, list(seeds), options.processes), strict=True))
    runs = [(cell, noise, seed) for cell in cells for noise in (None, *NOISES) for seed in seeds]
    found = dict(zip(runs, in_parallel(seen, [(run, aims[run[2]]) for run in runs], options.processes), strict=True))
    rows, records = [], []
    for cell in cells:
        base = {seed: found[cell, None, seed] for seed in seeds}
        cap_s = LIMIT * max(each.seconds for each in base.values() if math.isfinite(each.seconds))
        for noise in NOISES:
            ratio = str(compared({seed: found[cell, noise, seed] for seed in seeds}, base, cap_s))
            rows.append((cell.machines, f"{cell.overhead:g}", f"{noise:g}", ratio))
            records.append(
                {"machines": cell.machines, "overhead": cell.overhead, "gradient noise": noise, "ratio": ratio}
            )
    columns = ["speeds", "overhead", "gradient noise", "seconds = rounds x seconds a round"]
    print_table("lb-bsp over FedAvg", columns, rows)
    write_json(options.out, {"records": records})


if __name__ == "__main__":
    main()
