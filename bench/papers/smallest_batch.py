"""Smallest batch on the task heart: seconds to the target of ``lb-bsp`` over FedAvg, by ``balancer.floor``.

A small batch has a noisy gradient, and the update of a slow silo counts as much as before. So balanced batches may need
more rounds, which shorter rounds must make up for. A floor bounds this noise, and lengthens rounds.

Both sides do one step of rate 1, which is FedAvg's best setting in all of these cells of `map.py`, on the seeds that
the map reports. A run that misses the target counts with four times the slowest run of FedAvg.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from bench.common import in_parallel, print_table, write_json
from bench.papers.map_cells import BALANCED, BATCH, FEDAVG, TASKS, Cell, Side, pooled, sets
from bench.papers.map_replay import seen_of
from bench.papers.map_search import FRESH, LIMIT
from bench.papers.map_tables import compared
from bench.papers.target_runs import Job, carry_out
from bench.papers.target_search import Point, Seen

HEART = TASKS["heart"]
POINT = Point(1, 1.0)
FLOORS = (1, BATCH // 4, BATCH // 2)
"""Smallest batches of a silo [samples]; all silos have `BATCH` on average."""
CELLS = (Cell("10", 0.1), Cell("10", 1.0), Cell("10", 3.0), Cell("one slow", 0.1), Cell("one slow", 3.0))

Run = tuple[Cell, int, int]
"""Cell, floor and seed; floor 0 is FedAvg's."""


def aim(seed: int) -> float:
    """Loss that is to be reached: slightly above that of pooled training."""
    silos = json.dumps(CELLS[0].cluster(HEART.silos).entries())
    return float(carry_out(Job("pooled", FEDAVG, pooled("heart", seed), silos))["loss"]) * (1 + HEART.target)


def seen(run: tuple[Run, float]) -> Seen:
    """Seconds and rounds to a loss."""
    (cell, floor, seed), loss = run
    strategy = BALANCED if floor else FEDAVG
    stop = f"stop={{rounds: 400, target: {{metric: loss, at_most: {loss!r}}}}}"
    changes = (*sets("heart", Side(strategy), cell, POINT, seed), stop)
    changes += (f"balancer.floor={floor}",) if floor else ()
    return seen_of(carry_out(Job("seconds", strategy, changes, json.dumps(cell.cluster(HEART.silos).entries()))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one cell, two seeds")
    parser.add_argument("--out", type=Path, default=Path("bench/results/smallest_batch.json"))
    options = parser.parse_args()
    cells, seeds = (CELLS[:1], range(FRESH, FRESH + 2)) if options.quick else (CELLS, range(FRESH, FRESH + 10))
    aims = dict(zip(seeds, in_parallel(aim, list(seeds), options.processes), strict=True))
    runs = [(cell, floor, seed) for cell in cells for floor in (0, *FLOORS) for seed in seeds]
    found = dict(zip(runs, in_parallel(seen, [(run, aims[run[2]]) for run in runs], options.processes), strict=True))
    rows, records = [], []
    for cell in cells:
        base = {seed: found[cell, 0, seed] for seed in seeds}
        cap_s = LIMIT * max(each.seconds for each in base.values() if math.isfinite(each.seconds))
        for floor in FLOORS:
            ratio = compared({seed: found[cell, floor, seed] for seed in seeds}, base, cap_s)
            rows.append((cell.machines, f"{cell.overhead:g}", str(floor), str(ratio)))
            records.append({"machines": cell.machines, "overhead": cell.overhead, "floor": floor, "ratio": str(ratio)})
    print_table("lb-bsp over FedAvg", ["speeds", "overhead", "floor", "seconds = rounds x seconds a round"], rows)
    write_json(options.out, {"records": records})


if __name__ == "__main__":
    main()
