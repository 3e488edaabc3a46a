"""The map: where a strategy is faster than FedAvg with the same server optimizer, both tuned, and by how much.

    python bench/papers/map.py [--resume] [--minutes 60] [--tasks digits] [--machines 1 3 contention]
                               [--overheads 0.1 1] [--strategies lb-bsp auto] [--optimizers none] [--markdown] [--quick]

A cell is a kind of machines (speeds from 1 to 1, 1.5, 3 or 10; one silo ten times slower; other load now and then) and
the overhead of an order, over the time of one local step of the slowest silo. FedAvg and each strategy get the local
steps and the rate that are best on five tuning seeds, from one grid that grows until the optimum lies inside,
by successive halving (``target_search.py``). The reported figures are of ten other seeds, paired by seed, with 95 %
intervals. The best strategy of a cell is the best on the tuning seeds. ``auto`` runs as shipped.

Each cell has the ratio of seconds, which is the ratio of rounds times the ratio of seconds a round, and the bound: the
ratio of seconds of a round with perfect balance at FedAvg's steps.

``--optimizers`` names others: the server optimizers of FedAvg's family, Adam at the silos (``local-adam``) and FedProx.
With ``--strategies auto`` only FedAvg and ``auto`` run. FedAvg with each optimizer is compared to FedAvg without.

A training is done once for all cells in which the silos do the same work, and its seconds are replayed
(``map_replay.py``). Results of single runs lie beside the JSON: ``--resume`` continues while the code is the same.
After ``--minutes`` no run begins, so ``--resume --minutes 0`` prints the results that exist. Cells without results are
marked as not computed. ``--any-code`` also takes results of other versions of the code, and prints their number.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import time
from pathlib import Path

from bench.common import beside, write_json
from bench.papers import map_search, map_tables
from bench.papers.map_cells import AUTO, MACHINES, OPTIMIZERS, OURS, OVERHEADS, TASKS, USUAL, Cell
from bench.papers.target_runs import Cache, Runner, code


def commit() -> str:
    """Commit of the working tree, with ``+`` where files differ from it; empty without git."""
    done = subprocess.run(["git", "describe", "--always", "--dirty=+"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--machines", nargs="+", choices=MACHINES, default=list(MACHINES))
    parser.add_argument("--overheads", nargs="+", type=float, default=list(OVERHEADS))
    parser.add_argument("--strategies", nargs="+", choices=[*OURS, AUTO], default=[*OURS, AUTO])
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(USUAL))
    parser.add_argument("--seeds", type=int, default=10, help="that are reported")
    parser.add_argument("--tuning", type=int, default=5, help="seeds to tune by")
    parser.add_argument("--minutes", type=float, help="no run begins after so many; by default all are made")
    parser.add_argument("--resume", action="store_true", help="go on with a map that was cut off")
    parser.add_argument("--any-code", action="store_true", help="use results of other versions of the code, too")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--markdown", action="store_true", help="tables for a page")
    parser.add_argument("--quick", action="store_true", help="few seeds and cells, low targets: to see that it works")
    parser.add_argument(
        "--out", type=Path, default=Path("bench/results/map.json"), help="JSON; the picture is beside it"
    )
    return parser.parse_args()


def main() -> None:
    options = options_of()
    targets: dict[str, float] = {}
    if options.quick:
        options.tasks, options.machines, options.overheads = ["digits"], ["1", "3"], [0.1]
        options.strategies, options.seeds, options.tuning = ["lb-bsp", AUTO], 2, 1
        targets = {"digits": 0.5}
    began = time.perf_counter()
    until = math.inf if options.minutes is None else time.monotonic() + 60 * options.minutes
    cache = Cache(options.out.with_suffix(".cache.jsonl"), resume=options.resume, any_code=options.any_code)
    runner = Runner(cache, options.processes, until=until)
    sides = map_search.sides_of(options.strategies, options.optimizers)
    plan = map_search.stages(options.tasks, options.machines, options.overheads, sides)
    seeds = tuple(
        range(first, first + count)
        for first, count in ((map_search.TUNING, options.tuning), (map_search.FRESH, options.seeds))
    )
    try:
        out = map_search.compare(runner, plan, (seeds[0], seeds[1]), targets, small=options.quick)
    finally:
        runner.close()
    cells = [Cell(machines, overhead) for machines in options.machines for overhead in options.overheads]
    panels = [(task, optimizer, cells) for task in options.tasks for optimizer in options.optimizers]
    records = map_tables.show(out, panels, beside(options.out), markdown=options.markdown)
    for text in out.failed:
        print(text)
    whole = {
        "targets": {task: targets.get(task, TASKS[task].target) for task in options.tasks},
        "seeds": [list(each) for each in seeds],
        "commit": commit(),
        "code": code(),
        "results_by_code": cache.codes,
        "wall_s": time.perf_counter() - began,
    }
    write_json(options.out, whole | {"cells": records})
    print(f"{len(records)} of {len(panels) * len(cells)} cells")
    print(f"{out.trained} runs trained or read from the file, {out.replayed} replayed")
    print(f"{runner.done} new runs in {time.perf_counter() - began:.0f} s of real time")
    if len(cache.codes) > 1:
        print(f"Results are of {len(cache.codes)} versions of the code: {sorted(cache.codes.values(), reverse=True)}")


if __name__ == "__main__":
    main()
