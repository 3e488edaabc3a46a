"""SCAFFOLD: rounds to a target accuracy beside FedAvg, each at its best learning rate of the same grid.

    python bench/papers/scaffold.py [--seeds 3] [--steps 5 20 50] [--rates 0.05 0.1 0.2] [--target 0.9] [--quick]

Non-i.i.d. digits, two classes a silo, eight silos that do equal numbers of local steps (tau). The rate is that of the
silos' SGD (eta); both strategies weigh by samples. A run that misses the target in ``--most`` rounds counts as that.
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

KINDS = {"fedavg": "null", "scaffold": "{kind: scaffold}"}


@dataclass(frozen=True)
class ScaffoldJob:
    """One run."""

    kind: str
    steps: int
    rate: float
    seed: int
    target: float
    most: int


def one_run(job: ScaffoldJob) -> dict[str, Any]:
    # Imported where used: torch takes seconds, and the process that hands out the runs does not need it.
    from fedsync.observe.replay import read_ledger
    from fedsync.simulation.run import run_virtual

    sets = [
        f"stop={{rounds: {job.most}, target_accuracy: {job.target}}}",
        f"local={{steps: {job.steps}, batch_size: 32, learning_rate: {job.rate}}}",
        "aggregation={kind: fednova, weight: examples}",
        f"server_optimizer={KINDS[job.kind]}",
        f"seed={job.seed}",
    ]
    with tempfile.TemporaryDirectory() as folder:
        summary = run_virtual(StrategyConfig.load("bsp", sets), ClusterConfig.load("homogeneous"), Path(folder))
        seconds = summary["seconds_to_target"]
        rounds = [row for row in read_ledger(Path(folder) / "journal.jsonl").rounds if row.at_s <= (seconds or 0)]
    about = {"kind": job.kind, "steps": job.steps, "rate": job.rate, "seed": job.seed}
    return {**about, "rounds": None if seconds is None else len(rounds), "accuracy": summary["accuracy"]}


def cell(rows: list[dict[str, Any]], most: int) -> tuple[float, str]:
    """Mean rounds of some seeds, and what the table says of them."""
    missed = sum(row["rounds"] is None for row in rows)
    mean = fmean(row["rounds"] or most for row in rows)
    return mean, f"{mean:.0f}" if not missed else f">{mean:.0f} ({missed} missed)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, nargs="+", default=[5, 20, 50], help="tau: local steps of an order")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.05, 0.1, 0.2], help="eta: learning rates tried")
    parser.add_argument("--target", type=float, default=0.9)
    parser.add_argument("--most", type=int, default=120, help="rounds after which a run ends")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one seed, one number of steps, one rate")
    parser.add_argument("--markdown", action="store_true", help="print the table for a page, too")
    parser.add_argument("--out", type=Path, default=Path("bench/results/scaffold.json"))
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.steps, options.rates = 1, [20], [0.1]
    jobs = [
        ScaffoldJob(kind, steps, rate, seed, options.target, options.most)
        for steps in sorted(options.steps, reverse=True)
        for rate in options.rates
        for kind in KINDS
        for seed in range(7, 7 + options.seeds)
    ]
    rows = in_parallel(one_run, jobs, options.processes)
    write_json(options.out, rows)
    columns = ["local steps, strategy", *(f"rate {rate:g}" for rate in options.rates), "best"]
    table = []
    for steps in options.steps:
        for kind in KINDS:
            mine = [row for row in rows if (row["kind"], row["steps"]) == (kind, steps)]
            cells = [cell([row for row in mine if row["rate"] == rate], options.most) for rate in options.rates]
            table.append([f"{steps}, {kind}", *(text for _, text in cells), f"{min(mean for mean, _ in cells):.0f}"])
    print_table(f"Rounds to {options.target:.0%}, mean of {options.seeds} seeds", columns, table)
    if options.markdown:
        print(markdown_table(columns, table))


if __name__ == "__main__":
    main()
