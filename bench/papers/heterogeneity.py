"""LB-BSP at three levels of heterogeneity, as in LB-BSP's figure 12, in virtual time with real training.

    python bench/papers/heterogeneity.py [--seeds 3] [--cycles 0.05 ...] [--timing-only] [--quick] [--out FILE.json]

Eight equal machines, 32 samples a step in the mean, one step an order (an iteration of the paper), 2 s each on an idle
machine; i.i.d. digits, updates weighed by samples (section 3.4). Each machine has a competing process that slows
training while it runs, and that runs and sleeps for exponentially distributed times. Its share of the time differs from
silo to silo:

- ``homo``: nobody competes;
- ``L2``, ``L3``: in the mean the slowest silo has 1/2 (1/3) of the speed of the fastest, the others lie evenly between.

The paper does not say how long the process runs at a time, which is decisive. Many changes within an iteration average
out and can be predicted. About one change an iteration cannot be predicted. A rare change is seen afterwards.
So ``cycle`` (mean seconds from one start of the process to the next) is a column.

Columns: seconds an iteration (eight updates) takes, as a ratio to ASP's, where nobody waits; updates until the
target accuracy, as a ratio to BSP's; their product with the seconds an update takes, the time to the target, as a ratio
to BSP's. Mean of the seeds, with the least and the most in brackets.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.common import bar, beside, figure, in_parallel, markdown_table, print_table, save, write_json
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig

SILOS, BATCH, SPEED = 8, 32, 16.0
LEVELS: dict[str, tuple[float, float]] = {"homo": (1.0, 1.0), "L2": (1 / 2, 0.25), "L3": (1 / 3, 1 / 6)}
"""Mean speed of the slowest as a share of the fastest's, and what the process leaves while it runs."""
CYCLES = (0.05, 2.0, 200.0)
FIXED, SHARED = {"kind": "fixed"}, {"kind": "proportional"}
STRATEGIES: dict[str, dict[str, Any]] = {
    "bsp": {"barrier": {"kind": "bsp"}, "balancer": FIXED},
    "asp": {"barrier": {"kind": "asp"}, "balancer": FIXED},
    "ssp": {"barrier": {"kind": "ssp", "staleness": 5}, "balancer": FIXED},
    "lb-bsp": {"barrier": {"kind": "bsp"}, "balancer": SHARED},
}


@dataclass(frozen=True)
class Job:
    """One run of so many iterations."""

    level: str
    cycle_s: float
    strategy: str
    seed: int
    iterations: int
    target: float
    timing: bool


def cluster(level: str, cycle_s: float) -> ClusterConfig:
    slowest, factor = LEVELS[level]
    silos: list[dict[str, Any]] = []
    for index in range(SILOS):
        silo: dict[str, Any] = {"name": f"silo-{index}", "speed": SPEED, "jitter": 0.02}
        lost = (1 - slowest) * index / (SILOS - 1)
        if lost > 0:
            on_s = cycle_s * lost / (1 - factor)
            silo["contention"] = {"kind": "markov", "factor": factor, "on_s": on_s, "off_s": cycle_s - on_s}
        silos.append(silo)
    return ClusterConfig.model_validate({"silos": silos})


def one_run(job: Job) -> dict[str, Any]:
    # Imported where used: torch takes seconds, and the process that hands out the runs does not need it.
    from fedsync.simulation.run import run_virtual
    from fedsync.simulation.timing_only import run_timing

    chosen = STRATEGIES[job.strategy]
    together = chosen["barrier"]["kind"] == "bsp"
    config = StrategyConfig.model_validate(
        {
            "name": job.strategy,
            "seed": job.seed,
            "stop": {"rounds": job.iterations * (1 if together else SILOS)},
            "local": {"steps": 1, "batch_size": BATCH, "learning_rate": 0.1},
            "predictor": {"kind": "ema", "alpha": 0.2},
            "aggregation": {"kind": "fedavg", "weight": "samples"},
            "task": {"kind": "digits", "partition": {"kind": "iid"}},
            **chosen,
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        run = run_timing if job.timing else run_virtual
        summary = run(config, cluster(job.level, job.cycle_s), Path(folder))
        rows = [json.loads(text) for text in (Path(folder) / "rounds.jsonl").read_text().splitlines()]
    updates = SILOS if together else 1
    reached = next((row for row in rows if row["accuracy"] is not None and row["accuracy"] >= job.target), None)
    return {
        "level": job.level,
        "cycle_s": job.cycle_s,
        "strategy": job.strategy,
        "seed": job.seed,
        "iteration_s": summary["seconds"] / (len(rows) * updates) * SILOS,
        "updates_to_target": reached["round"] * updates if reached else None,
        "seconds_to_target": reached["at_s"] if reached else None,
        "accuracy": summary["accuracy"],
        "wait_fraction": summary["wait_fraction"],
    }


def ratios(rows: list[dict[str, Any]], key: str, to: str) -> list[float | None]:
    """Of each row to that of another strategy under the same conditions with the same seed."""
    base = {(row["level"], row["cycle_s"], row["seed"]): row[key] for row in rows if row["strategy"] == to}
    found = []
    for row in rows:
        other = base[row["level"], row["cycle_s"], row["seed"]]
        found.append(row[key] / other if row[key] is not None and other is not None else None)
    return found


def spread(values: list[float | None], digits: int = 2) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    text = f"{fmean(known):.{digits}f}"
    text += f" ({min(known):.{digits}f} to {max(known):.{digits}f})" if len(known) > 1 else ""
    return text if len(known) == len(values) else f"{text} missed {len(values) - len(known)}/{len(values)}"


def show(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    iteration = ratios(rows, "iteration_s", "asp")
    updates, seconds = ratios(rows, "updates_to_target", "bsp"), ratios(rows, "seconds_to_target", "bsp")
    body, bars = [], []
    for level, cycle_s in dict.fromkeys((row["level"], row["cycle_s"]) for row in rows):
        for name in STRATEGIES:
            mine = [
                i for i, r in enumerate(rows) if (r["level"], r["cycle_s"], r["strategy"]) == (level, cycle_s, name)
            ]
            body.append(
                [
                    f"{level}, {name}",
                    "-" if level == "homo" else f"{cycle_s:g}",
                    f"{fmean(rows[i]['iteration_s'] for i in mine):.2f}",
                    *(spread([column[i] for i in mine]) for column in (iteration, updates, seconds)),
                    f"{fmean(rows[i]['wait_fraction'] for i in mine):.1%}",
                ]
            )
            label = level if level == "homo" else f"{level}, {cycle_s:g} s"
            bars.append((label, name, fmean(value for i in mine if (value := iteration[i]) is not None)))
    columns = [
        "level, strategy",
        "cycle [s]",
        "iteration [s]",
        "to ASP's",
        "updates, to BSP's",
        "time, to BSP's",
        "wait",
    ]
    print_table(f"{SILOS} silos, {options.seeds} seed(s), target {options.target:g}", columns, body)
    if options.markdown:
        print(markdown_table(columns, body))
    labels = list(dict.fromkeys(label for label, _, _ in bars))
    made, (ax,) = figure(width=8.0)
    wide = 0.8 / len(STRATEGIES)
    for index, name in enumerate(STRATEGIES):
        at = [place + (index - (len(STRATEGIES) - 1) / 2) * wide for place in range(len(labels))]
        ax.bar(at, [value for _, other, value in bars if other == name], 0.92 * wide, **bar(index), label=name)
    ax.axhline(1.05, color="black", linewidth=0.8, linestyle="--")
    ax.set(xticks=range(len(labels)), xticklabels=labels, ylabel="seconds an iteration / ASP's")
    ax.legend(fontsize=7, frameon=False)
    save(made, beside(options.out))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=150)
    parser.add_argument("--target", type=float, default=0.9)
    parser.add_argument("--cycles", type=float, nargs="+", default=list(CYCLES))
    parser.add_argument("--timing-only", action="store_true", help="train nothing: no accuracy, only seconds")
    parser.add_argument("--quick", action="store_true", help="one seed, L2 only: to see that it works")
    parser.add_argument("--markdown", action="store_true", help="the table once more, for a page")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("bench/results/heterogeneity.json"))
    options = parser.parse_args()
    places = [("homo", 0.0), *((level, cycle_s) for level in ("L2", "L3") for cycle_s in options.cycles)]
    if options.quick:
        options.seeds, options.iterations, options.target = 1, 10, 0.3
        places = [("homo", 0.0), ("L2", options.cycles[0])]
    began = time.perf_counter()
    jobs = [
        Job(level, cycle_s, name, seed, options.iterations, options.target, options.timing_only)
        for level, cycle_s in places
        for name in STRATEGIES
        for seed in range(7, 7 + options.seeds)
    ]
    rows = in_parallel(one_run, jobs, options.processes)
    write_json(options.out, {"target": options.target, "iterations": options.iterations, "runs": rows})
    show(rows, options)
    print(f"{time.perf_counter() - began:.0f} s of real time")


if __name__ == "__main__":
    main()
