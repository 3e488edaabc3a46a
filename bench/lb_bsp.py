"""LB-BSP against FedAvg in virtual time: seconds and accuracy on five silos of unequal speed.

With no jitter, no overhead and equal rounds, theory says that a balanced round takes
``v_min x n / sum v`` of an unbalanced one (all silos finish together, against waiting for the slowest).
Prints what came out, round by round from the second on (in the first, no speed is known yet).

Source: LB-BSP, sections 3.1 and 5.5.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.sim.run import run_virtual

VARIANTS: dict[str, tuple[str, list[str]]] = {
    "fedavg": ("fedavg", []),
    "lb-bsp": ("lb-bsp", []),
    "lb-bsp, steps scaled": ("lb-bsp", ["balancer.scale=steps"]),
    "lb-bsp, learning rate scaled": ("lb-bsp", ["balancer.scale=learning_rate"]),
}


def one_run(strategy: str, overrides: list[str], seed: int, cluster: ClusterConfig) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        config = StrategyConfig.load(strategy, [*overrides, f"seed={seed}"])
        summary = run_virtual(config, cluster, Path(folder))
        rounds = [json.loads(line) for line in (Path(folder) / "rounds.jsonl").read_text().splitlines()]
    return {
        "seconds": summary["seconds"],
        "later_seconds": summary["seconds"] - rounds[0]["seconds"],
        "accuracy": summary["accuracy"],
        "wait_fraction": summary["wait_fraction"],
        "rounds": summary["rounds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench/results/lb_bsp.json"))
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    cluster = ClusterConfig.load("hetero")
    speeds = [silo.speed for silo in cluster.silos]
    theory = min(speeds) * len(speeds) / sum(speeds)

    jobs = [(name, seed) for name in VARIANTS for seed in range(7, 7 + options.seeds)]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in VARIANTS}
    for name, seed in track(jobs, description="runs", console=Console(stderr=True)):
        strategy, overrides = VARIANTS[name]
        runs[name].append(one_run(strategy, overrides, seed, cluster))

    def mean(name: str, key: str) -> float:
        return fmean(run[key] for run in runs[name])

    table = Table(
        title=f"hetero.yaml, {runs['fedavg'][0]['rounds']} rounds, {options.seeds} seeds; theory: ratio {theory:.3f}",
        box=box.SIMPLE_HEAD,
    )
    for column in (
        "strategy",
        "seconds",
        "ratio",
        "ratio after round 1",
        "over theory",
        "accuracy",
        "points",
        "waiting",
    ):
        table.add_column(column, justify="left" if column == "strategy" else "right")
    rows = []
    for name in VARIANTS:
        ratio = mean(name, "later_seconds") / mean("fedavg", "later_seconds")
        row = {
            "strategy": name,
            "seconds": mean(name, "seconds"),
            "ratio": mean(name, "seconds") / mean("fedavg", "seconds"),
            "ratio_after_first_round": ratio,
            "theory": theory,
            "accuracy": mean(name, "accuracy"),
            "points_over_fedavg": 100 * (mean(name, "accuracy") - mean("fedavg", "accuracy")),
            "wait_fraction": mean(name, "wait_fraction"),
            "runs": runs[name],
        }
        rows.append(row)
        table.add_row(
            name,
            f"{row['seconds']:.1f}",
            f"{row['ratio']:.3f}",
            f"{ratio:.4f}",
            "-" if name == "fedavg" else f"{ratio / theory - 1:+.2%}",
            f"{row['accuracy']:.4f}",
            f"{row['points_over_fedavg']:+.2f}",
            f"{row['wait_fraction']:.1%}",
        )
    Console(width=120).print(table)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
