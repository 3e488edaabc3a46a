"""ElasticBSP against BSP, SSP and ASP in real training, like "ZipLine", figure 14; the second part of `zipline.py`.

As in the paper: four equal machines that others slow down now and then, so that stragglers come and go; i.i.d. data, a
model of dense layers, staleness 3 for SSP, look-aheads of 15 to 240, equal time for all; a silo's next steps are
predicted to be as long as its last. In addition: four machines of unequal and steady speed.

Unlike there, an order is 20 local steps and one update at its end, and its other costs are paid once for all
its steps. ElasticBSP sends nothing between two barriers, so a long superstep costs it fewer updates, and no stale
ones. Its look-ahead is in local steps, at least ten of which are a superstep.

The target is what BSP reaches with the same seed: its mean accuracy over the last fifth of its versions.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from bench.common import beside, figure, in_parallel, line, print_table, save
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig

LOOKAHEADS = (15, 30, 60, 120, 240)
SILOS = 4
SECONDS = 200.0
LAST = 0.2
SETS = (
    "task={kind: mlp, hidden: [128, 64], data: {kind: digits28, samples: 4000}, partition: {kind: iid}}",
    "local.learning_rate=0.05",
)
LAST_SPEED = "predictor={kind: memoryless}"
ALONE = f"aggregation.server_rate={1 / SILOS}"
VARIANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "BSP": ("bsp", ()),
    "SSP(3)": ("ssp", (ALONE,)),
    "ASP": ("asp", (ALONE,)),
    **{f"ElasticBSP, R = {most}": ("elastic", (f"barrier.lookahead={most}", LAST_SPEED)) for most in LOOKAHEADS},
}
CLUSTERS: dict[str, list[dict[str, Any]]] = {
    "stragglers come and go": [
        {
            "name": f"silo-{index}",
            "speed": 200.0,
            "contention": {"kind": "markov", "factor": 0.5, "on_s": 10, "off_s": 20},
        }
        for index in range(SILOS)
    ],
    "speeds from 1 to 2": [
        {"name": f"silo-{index}", "speed": speed} for index, speed in enumerate((133.0, 177.0, 223.0, 267.0))
    ],
}
"""Machines; of the first each is at half its speed for 10 s of 30 in the mean."""
Job = tuple[str, str, int, float]


def one_run(job: Job) -> dict[str, Any]:
    from fedsync.simulation.run import run_virtual

    name, place, seed, seconds = job
    silos = [silo | {"jitter": 0.05, "overhead_s": 0.2} for silo in CLUSTERS[place]]
    strategy, overrides = VARIANTS[name]
    config = StrategyConfig.load(strategy, [*SETS, *overrides, f"seed={seed}", f"stop={{seconds: {seconds}}}"])
    with tempfile.TemporaryDirectory() as folder:
        summary = run_virtual(config, ClusterConfig.model_validate({"silos": silos}), Path(folder))
        rounds = [json.loads(text) for text in (Path(folder) / "rounds.jsonl").read_text().splitlines()]
    rounds = [entry for entry in rounds if entry["accuracy"] is not None]
    return {
        "strategy": name,
        "cluster": place,
        "seed": seed,
        "at_s": [entry["at_s"] for entry in rounds],
        "accuracy": [entry["accuracy"] for entry in rounds],
        "steps": fmean(silo["steps"] / silo["orders"] for silo in summary["silos"]),
        **{key: summary[key] for key in ("samples", "commits", "wait_fraction")},
    }


def level(run: dict[str, Any]) -> float:
    """Mean accuracy of the last fifth of the versions."""
    accuracy: list[float] = run["accuracy"]
    return fmean(accuracy[-max(1, round(LAST * len(accuracy))) :])


def seconds_to(run: dict[str, Any], target: float) -> float | None:
    there = (at for at, accuracy in zip(run["at_s"], run["accuracy"], strict=True) if accuracy >= target)
    return next(there, None)


def training(quick: bool, processes: int) -> list[dict[str, Any]]:
    seeds, seconds = (1, 8.0) if quick else (3, SECONDS)
    jobs = [(name, place, 7 + seed, seconds) for place in CLUSTERS for name in VARIANTS for seed in range(seeds)]
    runs = in_parallel(one_run, jobs, processes)
    base = {(run["cluster"], run["seed"]): run for run in runs if run["strategy"] == "BSP"}
    for run in runs:
        bsp = base[run["cluster"], run["seed"]]
        run["level"] = level(run)
        run["seconds_to_target"] = seconds_to(run, level(bsp))
        reached, first = run["seconds_to_target"], seconds_to(bsp, level(bsp))
        run["ratio"] = reached / first if reached is not None and first is not None else None
        run["samples_ratio"] = run["samples"] / bsp["samples"]
    return runs


def show_training(runs: list[dict[str, Any]], out: Path) -> None:
    seeds = len({run["seed"] for run in runs})
    last = max(run["at_s"][-1] for run in runs)
    columns = (
        "strategy", "s to BSP's\naccuracy", "ratio", "last fifth", "samples,\nto BSP's", "commits", "steps an\norder",
        "waiting",
    )  # fmt: skip
    for place in CLUSTERS:
        print_table(
            f"{place}: {SILOS} silos, {last:.0f} virtual s, {seeds} seed(s), medians and ranges",
            columns,
            [(name, *cells([run for run in runs if belongs(run, place, name)], seeds)) for name in VARIANTS],
        )
    made, axes = figure(len(CLUSTERS))
    times = np.linspace(0, last, 200)
    # What is below is passed in the first seconds, and would press all that differs into the top.
    limits = (max(min(run["level"] for run in runs) - 0.25, 0.0), max(max(run["accuracy"]) for run in runs) + 0.02)
    for ax, place in zip(axes, CLUSTERS, strict=True):
        for index, name in enumerate(VARIANTS):
            mine = [run for run in runs if belongs(run, place, name)]
            curves = [np.interp(times, run["at_s"], np.maximum.accumulate(run["accuracy"])) for run in mine]
            ax.plot(times, np.median(curves, axis=0), **line(index, marker=False), label=name)
        ax.set(title=place, xlabel="virtual time [s]", ylabel="best accuracy so far", ylim=limits)
    axes[0].legend(fontsize=7, frameon=False, loc="lower right")
    save(made, beside(out, "-training"))


def belongs(run: dict[str, Any], place: str, name: str) -> bool:
    return (run["cluster"], run["strategy"]) == (place, name)


def cells(runs: list[dict[str, Any]], seeds: int) -> tuple[str, ...]:
    """What came of one strategy on one cluster."""
    ratios = [run["ratio"] for run in runs if run["ratio"] is not None]
    reached = [run["seconds_to_target"] for run in runs if run["seconds_to_target"] is not None]
    arrival = [f"{median(reached):.1f}"] if reached else []
    arrival += [f"missed {seeds - len(reached)}/{seeds}"] if len(reached) < seeds else []
    return (
        ", ".join(arrival),
        f"{median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})" if ratios else "-",
        f"{median(run['level'] for run in runs):.3f}",
        f"{fmean(run['samples_ratio'] for run in runs):.2f}",
        f"{fmean(run['commits'] for run in runs):.0f}",
        f"{fmean(run['steps'] for run in runs):.0f}",
        f"{max(fmean(run['wait_fraction'] for run in runs), 0.0):.1%}",
    )
