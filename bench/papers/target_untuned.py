"""Every shipped strategy as it is on three clusters, with real training: `measure`, `show`.

Encrypted strategies are left out: ``lb-bsp-he``, ``fsp-he`` and ``pssp-he`` differ from their namesakes in the cipher
alone, whose time is not simulated, and rounding to 16 bits does not show (``encrypted.py``).

FedAvg runs first, to the target, for at most ``--longest`` virtual seconds. Every other strategy stops at the target or
at four times FedAvg's seconds on the same cluster with the same seed: the ratio is to that run. The seconds are those
of the first commit that reached the target, which favours a strategy whose accuracy jitters, or that commits often.
Nothing in the files is tuned to the clusters; where they say 1 over the number of silos they mean five.

Theory, of time alone: on equal machines a strategy can beat BSP only by shorter rounds. On speeds from 1 to 3
balancing takes ``8 min(v) / sum(v)`` = 0.5 of FedAvg's time; a strategy without waiting has the same rate of samples.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.common import bar, beside, figure, in_parallel, markdown_table, print_table, save
from fedsync.common.errors import FedSyncError
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.extras.tuning.search import shipped
from fedsync.observe.ledger import Ledger

CLUSTERS = ("homogeneous", "one-to-three", "contention")
REFERENCE = "fedavg"
TIMES = 4.0
WALL_S = 240.0


@dataclass(frozen=True)
class Job:
    """One run, at most ``seconds`` of virtual time."""

    strategy: str
    cluster: str
    seed: int
    seconds: float
    target: float
    sets: tuple[str, ...]


class Patience:
    """Ends a run that takes too long in real time: a run that hangs is a result too."""

    def __init__(self) -> None:
        self.until = time.monotonic() + WALL_S

    def follow(self, ledger: Ledger) -> None:
        if time.monotonic() > self.until:
            raise TimeoutError(f"no end in {WALL_S:g} s of real time, at {ledger.seconds:.1f} virtual s")


def one_run(job: Job) -> dict[str, Any]:
    # Imported where used: torch takes seconds, and the process that hands out the runs does not need it.
    from bench.papers.target_evaluations import shared
    from fedsync.simulation.run import run_virtual

    stop = f"stop={{seconds: {job.seconds}, target_accuracy: {job.target}}}"
    row: dict[str, Any] = {"strategy": job.strategy, "cluster": job.cluster, "seed": job.seed, "limit_s": job.seconds}
    began = time.perf_counter()
    try:
        config = StrategyConfig.load(job.strategy, [*job.sets, f"seed={job.seed}", stop])
        with tempfile.TemporaryDirectory() as folder, shared():
            summary = run_virtual(config, ClusterConfig.load(job.cluster), Path(folder), listeners=[Patience()])
    except (FedSyncError, TimeoutError) as error:
        return row | {"failed": f"{type(error).__name__}: {error}", "seconds_to_target": None}
    keys = ("seconds_to_target", "seconds", "accuracy", "utilisation", "wait_fraction", "rounds", "samples")
    return row | {key: summary[key] for key in keys} | {"wall_s": time.perf_counter() - began}


def strategies() -> list[str]:
    """Names of all shipped ones that do not encrypt, the reference first."""
    return [REFERENCE, *(name for name in shipped() if name != REFERENCE)]


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    seeds = range(7, 7 + options.seeds)
    sets = tuple(options.set)

    def job(name: str, cluster: str, seed: int, seconds: float) -> Job:
        return Job(name, cluster, seed, seconds, options.target, sets)

    firsts = [job(REFERENCE, cluster, seed, options.longest) for cluster in options.clusters for seed in seeds]
    references = in_parallel(one_run, firsts, options.processes)
    for row in references:
        if "failed" in row:
            raise SystemExit(f"{REFERENCE} failed: {row['failed']}")
    base = {(row["cluster"], row["seed"]): row["seconds_to_target"] or options.longest for row in references}
    jobs = [
        job(name, cluster, seed, TIMES * base[cluster, seed])
        for name in options.strategies
        if name != REFERENCE
        for cluster in options.clusters
        for seed in seeds
    ]
    rows = [*references, *in_parallel(one_run, jobs, options.processes)]
    for row in rows:
        reached = row["seconds_to_target"]
        row["ratio"] = None if reached is None else reached / base[row["cluster"], row["seed"]]
    return rows


def ratio(rows: list[dict[str, Any]]) -> str:
    """Mean and range over the seeds that reached the target, of one strategy on one cluster; how many did not.

    Of the reference, to which all are compared, it is the seconds.
    """
    done = [row for row in rows if "failed" not in row]
    if not done:
        return f"failed {len(rows)}/{len(rows)}"
    reached = [row["ratio"] for row in done if row["ratio"] is not None]
    parts = [f"{fmean(reached):.2f} ({min(reached):.2f}-{max(reached):.2f})"] if reached else []
    if reached and rows[0]["strategy"] == REFERENCE:
        parts = [f"{fmean(row['seconds_to_target'] for row in done if row['ratio'] is not None):.1f} s"]
    missed = len(rows) - len(reached)
    return ", ".join(parts + ([f"missed {missed}/{len(rows)}"] if missed else []))


def details(rows: list[dict[str, Any]]) -> tuple[str, str, str]:
    """Seconds, utilisation and waiting of one strategy on one cluster, as text."""
    done = [row for row in rows if "failed" not in row]
    if not done:
        return "-", "-", "-"
    reached = [row["seconds_to_target"] for row in done if row["seconds_to_target"] is not None]
    utilisation, waiting = (fmean(row[key] for row in done) for key in ("utilisation", "wait_fraction"))
    return f"{fmean(reached):.1f}" if reached else "-", f"{utilisation:.0%}", f"{max(waiting, 0.0):.1%}"


def show(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    names = list(dict.fromkeys(row["strategy"] for row in rows))
    group: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        group.setdefault((row["strategy"], row["cluster"]), []).append(row)
    columns = ["strategy", *options.clusters]
    body = [[name, *(ratio(group[name, cluster]) for cluster in options.clusters)] for name in names]
    print_table(
        f"Virtual seconds to accuracy {options.target:g} as a ratio to {REFERENCE}'s, seed by seed: "
        f"mean (range) of {options.seeds} seed(s)",
        columns,
        body,
    )
    if options.details:
        heads = [f"{cluster}\n{what}" for cluster in options.clusters for what in ("seconds", "busy", "waiting")]
        found = [[name, *(text for c in options.clusters for text in details(group[name, c]))] for name in names]
        print_table("Seconds, and the share of time in which silos train and wait", ["strategy", *heads], found)
    if options.markdown:
        print(markdown_table(columns, body))
    for row in rows:
        if "failed" in row:
            print(f"{row['strategy']} on {row['cluster']}, seed {row['seed']}: {row['failed']}")
    draw(names, group, options)


def draw(names: list[str], group: dict[tuple[str, str], list[dict[str, Any]]], options: argparse.Namespace) -> None:
    """Bars of the means, and lines from the least to the greatest."""
    made, (ax,) = figure(width=7.5, height=0.42 * len(names) + 1.4)
    high = 0.8 / len(options.clusters)
    for index, cluster in enumerate(options.clusters):
        for place, name in enumerate(names):
            mine = group[name, cluster]
            reached = [row["ratio"] for row in mine if row["ratio"] is not None]
            at = place + (index - (len(options.clusters) - 1) / 2) * high
            end = fmean(reached) if reached else 0.0
            ax.barh(at, end, 0.92 * high, **bar(index), label=cluster if place == 0 else None)
            if len(reached) > 1:
                ax.plot([min(reached), max(reached)], [at, at], color="black", linewidth=1.0)
            if len(reached) < len(mine):
                text = f"missed {len(mine) - len(reached)}/{len(mine)}"
                ax.text(max(reached, default=0.0) + 0.03, at, text, fontsize=6, va="center")
    ax.axvline(1.0, color="black", linewidth=0.8, linestyle="--")
    ax.set(yticks=range(len(names)), yticklabels=names, xlabel="seconds to target / FedAvg's (less is better)")
    ax.set_title(f"Time to accuracy {options.target:g}; bars: mean, lines: range of the seeds")
    ax.invert_yaxis()
    ax.legend(fontsize=7, frameon=False, loc="upper right")  # beside the bars of 1
    save(made, beside(options.out))
