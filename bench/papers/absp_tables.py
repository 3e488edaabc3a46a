"""A-BSP against BSP, SSP and ASP on the paper's jobs: iterations, seconds an iteration, seconds (cf. tables 3 to 6).

    python bench/papers/absp_tables.py [--seeds 1] [--clusters tenants static] [--jobs ...] [--quick] [--out FILE.json]

Logistic regression, dense and sparse, a linear SVM, lasso, ridge regression, k-means, matrix factorisation and a small
network, on eight silos with equal shares of i.i.d. data. ``tenants``: other users slow each machine to a quarter of
its speed for half a minute at a time, a third of all time: the fastest is 4 times as fast as the slowest, as in the
paper's multi-tenant cluster. ``static``: constant speeds, the fastest 2.2 times the slowest, as in its physical one.

An order is one pass over a silo's data, as in the paper, 1.7 s at full speed. But the silo takes local steps of eight
samples, which move its parameters, while the paper's gradients are all taken at the round's parameters. So an iteration
there is one step of any number of samples; here it is as many steps as there was time for. The learning rates are such
that BSP needs some tens of iterations. Updates of BSP and A-BSP count by their samples; those of SSP and ASP by one
over the number of silos. An iteration of SSP and ASP is as many updates as there are silos, as in the paper.

The objective is the test loss. All run until they reach the loss of BSP after 95 % of its decrease in ``ITERATIONS``
iterations. A-BSP carries unprocessed data over (section 3.3.1). FedSync's sampler always does, so there is no "A-BSP
w/o DP" to compare with. Data stay at their silos (section 3.3.2 moves them).
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.common import bar, beside, figure, in_parallel, print_table, save, write_json
from bench.papers.objective import Job, retimed, run, target_of

SILOS = 8
EXAMPLES = 128
BATCH = 8
SPEED = 75.0
OVERHEAD_S = 0.1
ITERATIONS = 30
TIMES = 3.0
"""Virtual seconds that a model may take, as a multiple of BSP's."""
BSP, ABSP = "BSP", "A-BSP"
FAIR = "{kind: fedavg, weight: samples}"
EACH = f"{{kind: fedbuff, server_rate: {1 / SILOS}, staleness: {{kind: constant}}}}"
MODELS = {
    BSP: ("{kind: bsp}", FAIR),
    ABSP: ("{kind: a-bsp, sync_ratio: 0.5, report_s: 0.25}", FAIR),
    "SSP, s=3": ("{kind: ssp, staleness: 3}", EACH),
    "SSP, s=10": ("{kind: ssp, staleness: 10}", EACH),
    "ASP": ("{kind: asp}", EACH),
}
CLUSTERS = ("tenants", "static")
SAMPLES = SILOS * EXAMPLES * 5 // 4
"""With the fifth that is kept for tests."""


def blobs(number: int, features: int, apart: float) -> str:
    """Points around centres."""
    return f"{{kind: blobs, samples: {SAMPLES}, blobs: {number}, features: {features}, apart: {apart}}}"


def sparse(features: int, target: str) -> str:
    """Rows of which little is not zero."""
    return f"{{kind: sparse, samples: {SAMPLES}, features: {features}, informative: 50, target: {target}}}"


@dataclass(frozen=True)
class Work:
    """One of the paper's jobs.

    Args:
        task: of the strategy file.
        rate: learning rate; of k-means and factorisation, the share of the statistics that a step renews.
    """

    task: str
    rate: float


JOBS = {
    "LR": Work(f"{{kind: linear, loss: logistic, data: {blobs(2, 28, 0.2)}}}", 0.015),
    "sparse LR": Work(f"{{kind: linear, loss: logistic, data: {sparse(2000, 'class')}}}", 2.0),
    "SVM": Work(f"{{kind: linear, loss: hinge, data: {blobs(2, 28, 0.2)}}}", 0.003),
    "lasso": Work(f"{{kind: linear, loss: squared, l1: 0.001, data: {sparse(500, 'number')}}}", 0.2),
    "ridge": Work(f"{{kind: linear, loss: squared, l2: 0.001, data: {sparse(500, 'number')}}}", 0.2),
    "k-means": Work(f"{{kind: k-means, clusters: 16, data: {blobs(16, 8, 1.5)}}}", 0.01),
    "MF": Work(f"{{kind: factorisation, data: {{kind: ratings, users: {SAMPLES}, items: 40, known: 0.3}}}}", 0.01),
    "DNN": Work(f"{{kind: mlp, hidden: [32, 32], data: {blobs(8, 16, 0.7)}}}", 0.02),
}


def silos(cluster: str) -> tuple[dict[str, Any], ...]:
    """Entries of the silo file."""
    plain = {"jitter": 0.05, "overhead_s": OVERHEAD_S}
    if cluster == "tenants":
        busy = {"contention": {"kind": "markov", "factor": 0.25, "on_s": 30.0, "off_s": 60.0}}
        return tuple({"name": f"{silo}", "speed": SPEED, **plain, **busy} for silo in range(SILOS))
    speeds = [SPEED / (1 + 1.2 * silo / (SILOS - 1)) for silo in range(SILOS)]
    return tuple({"name": f"{silo}", "speed": speed, **plain} for silo, speed in enumerate(speeds))


Key = tuple[str, ...]


def job_of(key: Key, **limits: Any) -> Job:
    """The run of a cluster, job, model and seed."""
    cluster, name, model, seed = key
    barrier, aggregation = MODELS[model]
    sets = (
        f"task={JOBS[name].task}",
        f"local={{steps: {EXAMPLES // BATCH}, batch_size: {BATCH}, learning_rate: {JOBS[name].rate}}}",
        f"barrier={barrier}",
        f"aggregation={aggregation}",
        f"seed={seed}",
    )
    return Job(key, "bsp", sets, silos(cluster), **limits)


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a cluster, job and model; BSP is trained once, and timed on each cluster."""
    seeds = [str(seed) for seed in range(7, 7 + options.seeds)]
    pairs = [(name, seed) for name in options.jobs for seed in seeds]
    jobs = [job_of((CLUSTERS[0], name, BSP, seed), seconds=0.0, rounds=options.iterations) for name, seed in pairs]
    trained = dict(zip(pairs, in_parallel(run, jobs, options.processes), strict=True))
    runs = {}
    for cluster in options.clusters:
        for name, seed in pairs:
            row = trained[name, seed]
            job = job_of((cluster, name, BSP, seed), seconds=0.0, target=target_of(row["curve"]))
            runs[job.key] = retimed(row, job)
    jobs = []
    for (cluster, name, _, seed), row in list(runs.items()):
        for model in list(MODELS)[1:]:
            limits = {"seconds": TIMES * row["seconds_to"], "target": row["target"]}
            jobs.append(job_of((cluster, name, model, seed), **limits))
    for job, row in zip(jobs, in_parallel(run, jobs, options.processes), strict=True):
        runs[job.key] = row
    return [
        row_of((cluster, name, model), [runs[cluster, name, model, seed] for seed in seeds], runs, seeds)
        for cluster in options.clusters
        for name in options.jobs
        for model in MODELS
    ]


def row_of(key: Key, mine: list[dict[str, Any]], runs: dict[Key, dict[str, Any]], seeds: list[str]) -> dict[str, Any]:
    """Means over seeds; a run that missed the target counts with its limit."""
    cluster, name, model = key
    base = [runs[cluster, name, BSP, seed]["seconds_to"] for seed in seeds]
    seconds = [run["seconds_to"] or run["limit_s"] for run in mine]
    iterations = fmean(run["updates"] / SILOS for run in mine)
    return {
        "cluster": cluster,
        "job": name,
        "model": model,
        "seconds": fmean(seconds),
        "iterations": iterations,
        "iteration_s": fmean(seconds) / iterations,
        "speedup": fmean(one / own for one, own in zip(base, seconds, strict=True)),
        "missed": sum(run["seconds_to"] is None for run in mine),
        "wait_fraction": fmean(run["wait_fraction"] for run in mine),
        "runs": mine,
    }


def show(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """The papers' tables: models in rows, jobs in columns; and the speed-ups as bars."""
    found = {(row["cluster"], row["job"], row["model"]): row for row in rows}
    figures = {
        "seconds": lambda row: f"{row['seconds']:.0f}" + ("+" if row["missed"] else ""),
        "iterations": lambda row: f"{row['iterations']:.0f}",
        "seconds an iteration": lambda row: f"{row['iteration_s']:.2f}",
        "times as fast as BSP": lambda row: f"{row['speedup']:.2f}" + ("-" if row["missed"] else ""),
        "waiting": lambda row: f"{row['wait_fraction']:.0%}",
    }
    for cluster in options.clusters:
        body = [
            (f"{title}: {model}", *(cell(found[cluster, name, model]) for name in options.jobs))
            for title, cell in figures.items()
            for model in MODELS
        ]
        title = f"{cluster}: to the objective, {options.seeds} seed(s); + (or -): at least (at most), as some missed it"
        print_table(title, ("", *options.jobs), body)
    made, axes = figure(columns=len(options.clusters), width=6.0)
    wide = 0.8 / (len(MODELS) - 1)
    for ax, cluster in zip(axes, options.clusters, strict=True):
        for index, model in enumerate(list(MODELS)[1:]):
            places = [place + (index - (len(MODELS) - 2) / 2) * wide for place in range(len(options.jobs))]
            highs = [found[cluster, name, model]["speedup"] for name in options.jobs]
            ax.bar(places, highs, 0.92 * wide, **bar(index), label=model)
        ax.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
        ax.set(title=f"{cluster} (BSP = 1)", ylabel="times as fast to the objective")
        ax.set_ylim(0, 1.2 * ax.get_ylim()[1])
        ax.set_xticks(range(len(options.jobs)), options.jobs)
    axes[0].legend(fontsize=7, frameon=False, ncols=len(MODELS) - 1, loc="upper center")
    save(made, beside(options.out))


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clusters", nargs="+", choices=CLUSTERS, default=list(CLUSTERS))
    parser.add_argument("--jobs", nargs="+", choices=list(JOBS), default=list(JOBS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=ITERATIONS)
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it works")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("bench/results/absp_tables.json"))
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.iterations = 1, 2
    began = time.perf_counter()
    rows = measure(options)
    write_json(options.out, rows)
    show(rows, options)
    print(f"{time.perf_counter() - began:.0f} s of real time")


if __name__ == "__main__":
    main()
