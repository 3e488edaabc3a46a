"""Virtual seconds to a target accuracy, with real training: strategies as shipped, and all of them tuned.

    python bench/papers/time_to_target.py [--seeds 3] [--target 0.9] [--details] [--quick] [--markdown]
    python bench/papers/time_to_target.py --tuned [--resume] [--minutes 60] [--tasks digits] [--overheads 1] [--quick]

As shipped: every strategy that does not encrypt, on digits, two classes a silo, on three clusters, without overhead.
With eight silos, digits 0 to 5 are shared by two silos each and 6 to 9 are held by one silo each, so who forgets a silo
misses the target. ``--strategies`` names any, ``--set`` changes a value in all of them.

Tuned: what a strategy wins over a FedAvg that somebody has tuned. Orders cost 1 s or 0.2 s besides training, on four
clusters, in three tasks (``target_cells.py``). FedAvg and each strategy, with server momentum and without, get the
local steps and the learning rate at which they do best on three seeds, from one grid that grows until the optimum lies
inside it, by successive halving, the same for all; runs that cannot change what is chosen end early
(``target_search.py``). What is reported is of ten other seeds, paired by seed, as geometric mean over tasks, with 95 %
intervals, beside the strategies as they are. Where the best of several strategies is named, the tuning seeds say which.
``auto`` runs untuned; ``overlap`` is LB-BSP with an order queued at each silo. ``--waiting`` tunes nothing: LB-BSP over
FedAvg, both as shipped and without overhead, which is what waiting alone costs.

Results of single runs lie beside the JSON: ``--resume`` goes on, where the code is the same. With ``--minutes`` no run
begins after so many; tables have what is whole by then, so ``--resume --minutes 0`` prints what there is.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.common import beside, write_json
from bench.papers import target_cells, target_tables, target_tuned, target_untuned
from bench.papers.target_cells import Cell
from bench.papers.target_runs import Cache, Runner, code


def untuned(options: argparse.Namespace) -> None:
    """The strategies as they are."""
    options.seeds = options.seeds or 3
    options.clusters = options.clusters or list(target_untuned.CLUSTERS)
    options.strategies = options.strategies or target_untuned.strategies()
    if options.quick:
        options.seeds, options.target = 1, min(options.target, 0.6)
    began = time.perf_counter()
    rows = target_untuned.measure(options)
    write_json(options.out, {"target": options.target, "wall_s": time.perf_counter() - began, "runs": rows})
    target_untuned.show(rows, options)


def tuned(options: argparse.Namespace) -> None:
    """The tuned comparison."""
    clusters = options.clusters or list(target_cells.CLUSTERS)
    cells = [Cell(cluster, overhead_s) for overhead_s in options.overheads for cluster in clusters]
    tasks = {name: target_cells.TASKS[name].target for name in options.tasks}
    strategies = options.strategies or [target_cells.AUTO, *target_cells.OURS]
    fresh, tuning = options.seeds or 10, options.tuning
    if options.quick:  # above version 0 of all seeds
        tasks = {name: 0.1 if target_cells.TASKS[name].pooled else target - 0.1 for name, target in tasks.items()}
        fresh, tuning = 2, 1
    first, reported = target_tuned.TUNING, target_tuned.FRESH
    seeds = range(first, first + tuning), range(reported, reported + fresh)
    until = math.inf if options.minutes is None else time.monotonic() + 60 * options.minutes
    cache = Cache(options.out.with_suffix(".cache.jsonl"), resume=options.resume)
    runner = Runner(cache, options.processes, until=until)
    try:
        out = target_tuned.compare(
            runner, tasks, cells, strategies, seeds, small=options.quick, waiting=options.waiting
        )
    finally:
        runner.close()
    result = target_tables.show(out, list(tasks), cells, beside(options.out), markdown=options.markdown)
    for text in out.failed:
        print(text)
    chosen = [
        {"task": task, "machines": asdict(cell), "side": side.name, **asdict(found)}
        for (task, cell, side), found in out.chosen.items()
    ]
    whole = {"targets": tasks, "seeds": fresh, "tuning_seeds": tuning, "code": code(), "runs": runner.done}
    result |= {"chosen": chosen, "tuned": _seconds(out.tuned), "untuned": _seconds(out.untuned)}
    write_json(options.out, whole | result)
    print(f"{runner.done} runs")


def _seconds(found: Mapping[Any, Mapping[int, float]]) -> list[dict[str, Any]]:
    """Seconds by seed; None where the target was missed, which JSON can say."""
    return [
        {"task": task, "machines": asdict(cell), "side": side.name}
        | {"seconds": {seed: each if math.isfinite(each) else None for seed, each in seconds.items()}}
        for (task, cell, side), seconds in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tuned", action="store_true", help="the comparison of tuned strategies")
    parser.add_argument("--seeds", type=int, help="of the tables; by default 3, tuned 10")
    parser.add_argument("--clusters", nargs="+", help="by default those that the tables have")
    parser.add_argument("--strategies", nargs="+", help="by default all that are plain, tuned: ours")
    parser.add_argument("--quick", action="store_true", help="few seeds, low targets: to see that it works")
    parser.add_argument("--processes", "--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, help="JSON file; pictures lie beside it")
    parser.add_argument("--markdown", action="store_true", help="the tables once more, for a page")
    shipped = parser.add_argument_group("as shipped")
    shipped.add_argument("--target", type=float, default=0.9)
    shipped.add_argument("--longest", type=float, default=400.0, help="virtual seconds that FedAvg may take")
    shipped.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="in all strategies")
    shipped.add_argument("--details", action="store_true", help="a second table: seconds, utilisation and waiting")
    chosen = parser.add_argument_group("tuned")
    chosen.add_argument("--tasks", nargs="+", choices=list(target_cells.TASKS), default=list(target_cells.USUAL))
    chosen.add_argument("--overheads", type=float, nargs="+", default=list(target_cells.OVERHEADS), metavar="SECONDS")
    chosen.add_argument("--waiting", action="store_true", help="LB-BSP as shipped without overhead, and nothing else")
    chosen.add_argument("--tuning", type=int, default=3, help="seeds to tune by")
    chosen.add_argument("--minutes", type=float, help="no run begins after so many; by default all are made")
    chosen.add_argument("--resume", action="store_true", help="go on with a run that was cut off")
    options = parser.parse_args()
    name = "time_to_target_tuned" if options.tuned else "time_to_target"
    options.out = options.out or Path(f"bench/results/{name}.json")
    began = time.perf_counter()
    (tuned if options.tuned else untuned)(options)
    print(f"{time.perf_counter() - began:.0f} s of real time")


if __name__ == "__main__":
    main()
