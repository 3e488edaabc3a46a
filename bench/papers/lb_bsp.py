"""LB-BSP against FedAvg on five silos of unequal speed and two classes each, like LB-BSP, section 5.5.

    python bench/papers/lb_bsp.py [--tasks digits lenet5 lstm] [--seeds 3] [--runtime local] [--quick] [--out FILE.json]

FedAvg with equal batches and steps, LB-BSP as in the paper (``strategies/paper/lb-bsp.yaml``), and two variants that
the paper advises against: fast silos take more local steps (tau scaled), or the learning rate follows the batch (eta
scaled). The first row is flwr's own `FedAvg`, which averages the same silos' training on the same batches; ratios
are to it, seed by seed. All do the same number of rounds, each over the same number of samples.

Seconds. Without jitter and overhead, and with equal rounds, theory says that a balanced round takes
``v_min x n / sum v`` of an unbalanced one (all silos finish together, against waiting for the slowest). The results are
given for all rounds, and from the second on, because no speed is known in the first.

Accuracy. The target is that of flwr's FedAvg with the same seed: its mean over the last fifth of its rounds. A run
reaches it with its first version that is as good. ``best`` is the best version's, which figure 13 shows.

``--runtime local`` runs FedAvg and LB-BSP on real Flower processes, held to these speeds, and measures real seconds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from bench.common import beside, figure, in_parallel, line, print_table, save, write_json
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig

FLWR = "flwr FedAvg"
PAPER = "paper/lb-bsp"
VARIANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    FLWR: ("fedavg", ()),  # what it reads of the file is the work of a silo
    "lb-bsp": (PAPER, ()),
    "lb-bsp, steps scaled": (PAPER, ("balancer.scale=steps",)),
    "lb-bsp, learning rate scaled": (PAPER, ("balancer.scale=learning_rate",)),
}
LOCAL: dict[str, tuple[str, tuple[str, ...]]] = {"fedavg": ("fedavg", ()), "lb-bsp": (PAPER, ())}
"""Strategy files and what is set in them; the first is what others are compared to, in virtual and in real time."""
_TWO_CLASSES = "partition: {kind: pathological, classes_per_silo: 2}"
TASKS: dict[str, tuple[int, tuple[str, ...]]] = {
    "digits": (40, ()),
    "lenet5": (
        40,
        (
            "task={kind: images, model: lenet5, data: {kind: digits28, samples: 3000, test_samples: 600}, "
            f"{_TWO_CLASSES}}}",
        ),
    ),
    "lstm": (
        60,
        (
            "task={kind: sequences, hidden: 32, data: {kind: keywords, samples: 2000, frames: 16, bands: 12}, "
            f"{_TWO_CLASSES}}}",
            "local.momentum=0.9",
            "local.learning_rate=0.05",
        ),
    ),
}
"""Rounds, and what is set besides what the strategy file says."""
LAST = 0.2


@dataclass(frozen=True)
class Job:
    """One run."""

    task: str
    variant: str
    seed: int
    rounds: int
    local: bool


def one_run(job: Job) -> dict[str, Any]:
    # Imported where used: torch and flwr take seconds, and the process that hands out the runs needs neither.
    from bench.papers.lb_bsp_flwr import flwr_fedavg
    from fedsync.ops.local import run_local
    from fedsync.simulation.run import run_virtual

    strategy, overrides = (LOCAL if job.local else VARIANTS)[job.variant]
    sets = [*TASKS[job.task][1], *overrides, f"seed={job.seed}", f"stop={{rounds: {job.rounds}}}"]
    config, cluster = StrategyConfig.load(strategy, sets), ClusterConfig.load("hetero")
    row: dict[str, Any] = {"task": job.task, "variant": job.variant, "seed": job.seed, "rounds": job.rounds}
    if job.variant == FLWR:
        return row | flwr_fedavg(config, cluster)
    with tempfile.TemporaryDirectory() as folder:
        summary = (run_local if job.local else run_virtual)(config, cluster, Path(folder))
        rounds = [json.loads(text) for text in (Path(folder) / "rounds.jsonl").read_text().splitlines()]
    return row | {
        "wait_fraction": max(summary["wait_fraction"], 0.0),
        "at_s": [entry["at_s"] for entry in rounds],
        "accuracy": [entry["accuracy"] for entry in rounds],
    }


def level(accuracy: list[float]) -> float:
    """Mean of the last fifth of the rounds."""
    return fmean(accuracy[-max(1, round(LAST * len(accuracy))) :])


def compared(runs: list[dict[str, Any]], theory: float) -> list[dict[str, Any]]:
    """One row a variant, of the runs of one task; ratios are to the first variant, seed by seed."""
    names = list(dict.fromkeys(run["variant"] for run in runs))
    first = {run["seed"]: run for run in runs if run["variant"] == names[0]}

    def seconds_to(run: dict[str, Any]) -> float | None:
        target = level(first[run["seed"]]["accuracy"])
        there = (at for at, accuracy in zip(run["at_s"], run["accuracy"], strict=True) if accuracy >= target)
        return next(there, None)

    rows = []
    for name in names:
        mine = [run for run in runs if run["variant"] == name]
        pairs = [(run, first[run["seed"]]) for run in mine]
        later = [(run["at_s"][-1] - run["at_s"][0]) / (ref["at_s"][-1] - ref["at_s"][0]) for run, ref in pairs]
        to_target = [seconds_to(run) for run in mine]
        ratios = [at / base for at, (_, ref) in zip(to_target, pairs, strict=True) if at and (base := seconds_to(ref))]
        rows.append(
            {
                "variant": name,
                "seconds": fmean(run["at_s"][-1] for run in mine),
                "ratio": fmean(run["at_s"][-1] / ref["at_s"][-1] for run, ref in pairs),
                "ratio_after_first_round": fmean(later),
                "theory": theory,
                "best": fmean(max(run["accuracy"]) for run in mine),
                "level": fmean(level(run["accuracy"]) for run in mine),
                "points": 100 * fmean(level(run["accuracy"]) - level(ref["accuracy"]) for run, ref in pairs),
                "seconds_to_target": to_target,
                "target_ratios": ratios,
                "wait_fraction": fmean(run["wait_fraction"] for run in mine),
            }
        )
    return rows


def show(task: str, rows: list[dict[str, Any]], rounds: int, kind: str) -> None:
    seeds = len(rows[0]["seconds_to_target"])
    target = rows[0]["level"]
    body = []
    for index, row in enumerate(rows):
        reached = [at for at in row["seconds_to_target"] if at is not None]
        ratios, missed = row["target_ratios"], seeds - len(reached)
        arrival = [f"{fmean(reached):.1f}"] if reached else []
        arrival += [f"missed {missed}/{seeds}"] if missed else []
        spread = f" ({min(ratios):.2f}-{max(ratios):.2f})" if index and len(ratios) > 1 else ""
        balanced = row["variant"].startswith("lb-bsp")
        body.append(
            (
                row["variant"],
                f"{row['seconds']:.1f}",
                f"{row['ratio']:.3f}",
                f"{row['ratio_after_first_round']:.4f}",
                f"{row['ratio_after_first_round'] / row['theory'] - 1:+.2%}" if balanced else "-",
                f"{row['best']:.3f}",
                f"{row['level']:.3f}",
                f"{row['points']:+.1f}",
                ", ".join(arrival),
                (f"{fmean(ratios):.2f}" if ratios else "-") + spread,
                f"{row['wait_fraction']:.1%}",
            )
        )
    columns = (
        "strategy", "seconds", "ratio", "after\nround 1", "over\ntheory", "best", "last fifth", "points",
        f"seconds to\n{rows[0]['variant']}'s", "ratio", "waiting",
    )  # fmt: skip
    about = f"theory: ratio {rows[0]['theory']:.3f}; target {target:.3f} in the mean"
    print_table(f"{task}: hetero.yaml, {rounds} rounds, {seeds} seed(s), {kind} seconds; {about}", columns, body)


def draw(runs: list[dict[str, Any]], kind: str, out: Path) -> None:
    """Best accuracy so far over time, mean of the seeds, an axis a task."""
    tasks = list(dict.fromkeys(run["task"] for run in runs))
    made, axes = figure(len(tasks), width=4.4)
    for ax, task in zip(axes, tasks, strict=True):
        mine = [run for run in runs if run["task"] == task]
        for index, name in enumerate(dict.fromkeys(run["variant"] for run in mine)):
            curves = [run for run in mine if run["variant"] == name]
            times = np.mean([run["at_s"] for run in curves], axis=0)
            best = np.mean([np.maximum.accumulate(run["accuracy"]) for run in curves], axis=0)
            ax.plot(times, best, **line(index, marker=False), label=name)
        ax.set(title=task, xlabel=f"{kind} time [s]", ylabel="best accuracy so far", ylim=(0, 1))
    axes[0].legend(fontsize=7, frameon=False, loc="lower right")
    save(made, beside(out))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench/results/lb_bsp.json"))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, help="in place of each task's own")
    parser.add_argument("--runtime", choices=("virtual", "local"), default="virtual")
    parser.add_argument("--quick", action="store_true", help="one seed, two rounds: to see that it works")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.rounds = 1, 2
    local = options.runtime == "local"
    jobs = [
        Job(task, variant, seed, options.rounds or TASKS[task][0], local)
        for task in options.tasks
        for variant in (LOCAL if local else VARIANTS)
        for seed in range(7, 7 + options.seeds)
    ]
    # On real processes five silos share the machine as it is.
    runs = in_parallel(one_run, jobs, 1 if local else options.processes)
    speeds = [silo.speed for silo in ClusterConfig.load("hetero").silos]
    theory = min(speeds) * len(speeds) / sum(speeds)
    kind = "real" if local else "virtual"
    tables = {}
    for task in options.tasks:
        mine = [run for run in runs if run["task"] == task]
        tables[task] = compared(mine, theory)
        show(task, tables[task], mine[0]["rounds"], kind)
    write_json(options.out, {"runtime": options.runtime, "tables": tables, "runs": runs})
    draw(runs, kind, options.out)


if __name__ == "__main__":
    main()
