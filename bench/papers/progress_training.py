"""With real training: robustness to stragglers and the ways to draw the sample (PSP, figures 10-15 and 10-17).

- ``stragglers``: accuracy after equal virtual time, as a quarter of 16 silos slows down.
- ``sampling``: 24 silos, 6 of them half as fast; the same number of updates, the accuracies of the last ten evaluated
  versions.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import bar, beside, figure, in_parallel, line, print_table, save
from bench.papers.progress_shared import BARRIERS, silos, strategy
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig


def train(config: StrategyConfig, cluster: ClusterConfig) -> tuple[dict[str, Any], list[float]]:
    """A run with training: its summary, and the accuracy of each version that was evaluated."""
    from fedsync.observe.replay import read_ledger
    from fedsync.simulation.run import run_virtual

    with tempfile.TemporaryDirectory() as folder:
        summary = run_virtual(config, cluster, Path(folder))
        rounds = read_ledger(Path(folder) / "journal.jsonl").rounds
    return summary, [row.accuracy for row in rounds if row.accuracy is not None]


def real(barrier: dict[str, Any], seed: int, stop: dict[str, Any], count: int) -> StrategyConfig:
    """With training. One update moves the model by 1/n of itself, in whichever commit, as in the paper."""
    one_by_one = {"kind": "fedbuff", "server_rate": 1 / count, "staleness": {"kind": "constant"}}
    aggregation = {"kind": "fedavg"} if barrier["kind"] == "bsp" else one_by_one
    local = {"steps": 10, "batch_size": 32, "learning_rate": 0.1}
    return strategy(barrier, seed, stop=stop, aggregation=aggregation, local=local)


def straggler_run(job: tuple[str, int, int, float]) -> dict[str, Any]:
    name, slowness, seed, seconds = job
    cluster = silos([160.0] * 12 + [160.0 / slowness] * 4, jitter=0.3)
    summary, _ = train(real(BARRIERS[name], seed, {"seconds": seconds}, 16), cluster)
    orders = sum(silo["orders"] for silo in summary["silos"])
    kept = {key: summary[key] for key in ("accuracy", "wait_fraction")}
    return {"barrier": name, "slowness": slowness, "seed": seed, "updates": orders, **kept}


def stragglers(quick: bool, processes: int) -> list[dict[str, Any]]:
    slow, seeds, seconds = ((2,), 1, 5.0) if quick else ((2, 4, 6, 8), 2, 60.0)
    jobs = [(name, slowness, 7 + seed, seconds) for name in BARRIERS for slowness in slow for seed in range(seeds)]
    return in_parallel(straggler_run, jobs, processes)


def show_stragglers(runs: list[dict[str, Any]], out: Path) -> None:
    slow = sorted({run["slowness"] for run in runs})

    def cell(name: str, slowness: int, key: str) -> list[float]:
        return [run[key] for run in runs if (run["barrier"], run["slowness"]) == (name, slowness)]

    means = {name: [float(np.mean(cell(name, s, "accuracy"))) for s in slow] for name in BARRIERS}
    print_table(
        "Final accuracy after equal virtual time, 4 of 16 silos slow; in brackets: updates",
        ("barrier", *(f"{s}x slow" for s in slow), "drop [points]"),
        [
            (
                name,
                *(
                    f"{mean:.3f} ({np.mean(cell(name, s, 'updates')):.0f})"
                    for s, mean in zip(slow, means[name], strict=True)
                ),
                f"{100 * (means[name][0] - means[name][-1]):.1f}",
            )
            for name in BARRIERS
        ],
    )
    made, (ax,) = figure()
    for index, name in enumerate(BARRIERS):
        error = [float(np.ptp(cell(name, s, "accuracy"))) / 2 for s in slow]
        ax.errorbar(slow, means[name], error, **line(index), capsize=2, label=name)
    ax.set(title="Accuracy after equal time (cf. figure 10-15)", xlabel="slowness of the stragglers [times]")
    ax.set(ylabel="accuracy", xticks=slow)
    ax.legend(fontsize=7, frameon=False)
    save(made, beside(out, "-stragglers"))


def sampling_run(job: tuple[str, int, int, int]) -> dict[str, Any]:
    kind, size, seed, updates = job
    cluster = silos([160.0] * 18 + [80.0] * 6, jitter=0.3)
    barrier = {"kind": "sampled", "sample_size": size, "sampling": kind}
    summary, accuracies = train(real(barrier, seed, {"rounds": updates}, 24), cluster)
    orders = [silo["orders"] for silo in summary["silos"]]
    return {
        "sampling": kind,
        "sample_size": size,
        "seed": seed,
        "last_accuracies": accuracies[-10:],
        "accuracy": float(np.mean(accuracies[-10:])),
        "std": float(np.std(accuracies[-10:])),
        "seconds": summary["seconds"],
        "wait_fraction": summary["wait_fraction"],
        "range": max(orders) - min(orders),
    }


def sampling(quick: bool, processes: int) -> list[dict[str, Any]]:
    sizes, seeds, updates = ((2,), 1, 24) if quick else ((2, 4, 8), 2, 300)
    kinds = ("basic", "dynamic", "grouped")
    jobs = [(kind, size, 7 + seed, updates) for kind in kinds for size in sizes for seed in range(seeds)]
    return in_parallel(sampling_run, jobs, processes)


def show_sampling(runs: list[dict[str, Any]], out: Path) -> None:
    cells = list(dict.fromkeys((run["sampling"], run["sample_size"]) for run in runs))
    grouped = {cell: [run for run in runs if (run["sampling"], run["sample_size"]) == cell] for cell in cells}

    def mean(cell: tuple[str, int], key: str) -> float:
        return float(np.mean([run[key] for run in grouped[cell]]))

    print_table(
        "pBSP, 24 silos, 6 of them half as fast, equal numbers of updates; accuracy of the last ten versions",
        ("sampling", "sample size", "accuracy", "std", "virtual s", "max - min orders", "waiting"),
        [
            (
                *cell,
                f"{mean(cell, 'accuracy'):.3f}",
                f"{mean(cell, 'std'):.4f}",
                f"{mean(cell, 'seconds'):.0f}",
                f"{mean(cell, 'range'):.1f}",
                f"{mean(cell, 'wait_fraction'):.1%}",
            )
            for cell in cells
        ],
    )
    made, (left, right) = figure(2)
    for index, kind in enumerate(dict.fromkeys(kind for kind, _ in cells)):
        mine = [cell for cell in cells if cell[0] == kind]
        places = [index + 4 * number for number in range(len(mine))]
        values = [[a for run in grouped[cell] for a in run["last_accuracies"]] for cell in mine]
        boxes = left.boxplot(values, positions=places, widths=0.7, patch_artist=True, manage_ticks=False)
        for patch_ in boxes["boxes"]:
            patch_.set(**bar(index) | {"edgecolor": "black", "linewidth": 0.8})
        for median in boxes["medians"]:
            median.set(color="black")
        right.bar(places, [mean(cell, "seconds") for cell in mine], 0.8, **bar(index), label=kind)
    sizes = list(dict.fromkeys(size for _, size in cells))
    for ax in (left, right):
        ax.set(xlabel="sample size", xticks=[1 + 4 * i for i in range(len(sizes))], xticklabels=sizes)
    left.set(title="Last ten versions (cf. figure 10-17)", ylabel="accuracy")
    right.set(title="Time for as many updates", ylabel="virtual time [s]")
    right.legend(fontsize=7, frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, 1.0))
    right.set_ylim(0, 1.2 * right.get_ylim()[1])
    save(made, beside(out, "-sampling"))
