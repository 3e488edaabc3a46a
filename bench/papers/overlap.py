"""Overlap: rounds and virtual seconds to a target accuracy, and the share of time in which silos compute.

    python bench/papers/overlap.py [--seeds 3] [--steps 8] [--overhead 1.0] [--target 0.9] [--quick] [--processes 2]

Non-i.i.d. digits, two classes a silo, eight silos, LB-BSP with and without an order queued at each silo. Every order
costs a second besides training. `carry` is the share of its own update with which a silo begins a queued order: 0 is
the plain delay, 1 is CoCoD-SGD. `momentum` is that of FedAvgM at the server.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.common import in_parallel, markdown_table, print_table, write_json
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig

LONGEST_S = 200.0
PLAIN = "barrier={kind: bsp}"
KINDS: dict[str, tuple[str, ...]] = {
    "lb-bsp": (PLAIN,),
    **{
        f"overlap, carry {carry:g}": (f"barrier={{kind: overlap, carry: {carry}, inner: {{kind: bsp}}}}",)
        for carry in (0.0, 0.25, 1.0)
    },
}
WITH_MOMENTUM = ("lb-bsp", "overlap, carry 0", "overlap, carry 0.25", "overlap, carry 1")


@dataclass(frozen=True)
class OverlapJob:
    """One run."""

    name: str
    cluster: str
    seed: int
    overhead_s: float
    sets: tuple[str, ...]


def one_run(job: OverlapJob) -> dict[str, Any]:
    # Imported where used: torch takes seconds, and the process that hands out the runs does not need it.
    from fedsync.simulation.run import run_virtual

    config = StrategyConfig.load("lb-bsp", [*job.sets, f"seed={job.seed}"])
    silos = [silo.model_copy(update={"overhead_s": job.overhead_s}) for silo in ClusterConfig.load(job.cluster).silos]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        summary = run_virtual(config, ClusterConfig(silos=silos), out)
        from fedsync.observe.replay import read_ledger

        ledger = read_ledger(out / "journal.jsonl")
    seconds = summary["seconds_to_target"]
    rounds = sum(1 for row in ledger.rounds if seconds is not None and row.at_s <= seconds)
    found = {"seconds": seconds, "rounds": rounds or None, "utilisation": summary["utilisation"]}
    return {"name": job.name, "cluster": job.cluster, "seed": job.seed, **found}


def jobs(options: argparse.Namespace) -> list[OverlapJob]:
    shared = (
        f"stop={{seconds: {LONGEST_S}, target_accuracy: {options.target}}}",
        f"local.steps={options.steps}",
        f"aggregation.weight={options.weight}",
    )
    kinds = list(KINDS.items())
    for momentum in options.momentum:
        more = f"server_optimizer={{kind: fedavgm, momentum: {momentum}}}"
        kinds += [(f"{name}, momentum {momentum:g}", (*KINDS[name], more)) for name in WITH_MOMENTUM]
    return [
        OverlapJob(name, cluster, seed, options.overhead, (*shared, *sets))
        for cluster in options.clusters
        for name, sets in kinds
        for seed in range(7, 7 + options.seeds)
    ]


def mean(rows: list[dict[str, Any]], key: str, digits: int) -> str:
    found = [row[key] for row in rows if row[key] is not None]
    missed = f", missed {len(rows) - len(found)}/{len(rows)}" if len(found) < len(rows) else ""
    return f"{fmean(found):.{digits}f}{missed}" if found else f"missed {len(rows)}/{len(rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="tau: local steps of an order")
    parser.add_argument("--overhead", type=float, default=1.0, help="of an order besides training [s]")
    parser.add_argument("--target", type=float, default=0.9)
    parser.add_argument("--weight", default="examples", help="aggregation.weight")
    parser.add_argument("--momentum", type=float, nargs="*", default=[0.3, 0.6])
    parser.add_argument("--clusters", nargs="+", default=["homogeneous", "one-to-three"])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one seed, one cluster, no momentum")
    parser.add_argument("--markdown", action="store_true", help="print the table for a page, too")
    parser.add_argument("--out", type=Path, default=Path("bench/results/overlap.json"))
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.clusters, options.momentum = 1, ["one-to-three"], []
    rows = in_parallel(one_run, jobs(options), options.processes)
    write_json(options.out, rows)
    columns = ["strategy"]
    for cluster in options.clusters:
        columns += [f"{cluster}: rounds", "seconds", "computing"]
    table = []
    for name in dict.fromkeys(row["name"] for row in rows):
        cells = [name]
        for cluster in options.clusters:
            mine = [row for row in rows if (row["name"], row["cluster"]) == (name, cluster)]
            cells += [mean(mine, "rounds", 0), mean(mine, "seconds", 1), f"{fmean(r['utilisation'] for r in mine):.0%}"]
        table.append(cells)
    title = f"To {options.target:.0%}: tau {options.steps}, {options.overhead:g} s an order, {options.seeds} seeds"
    print_table(title, columns, table)
    if options.markdown:
        print(markdown_table(columns, table))


if __name__ == "__main__":
    main()
