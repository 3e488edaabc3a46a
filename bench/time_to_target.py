"""Virtual seconds to a target accuracy: every shipped strategy on three clusters, with real training.

    python bench/time_to_target.py [--seeds 3] [--target 0.9] [--quick] [--markdown] [--out FILE.json]

Non-i.i.d. digits as the strategy files deal them: two classes a silo. With eight silos, digits 0 to 5 are shared by two
silos each and 6 to 9 are held by one silo each, so who forgets a silo misses the target. (Dirichlet shares would be
another data set for every seed, easy or hard, with three seeds to tell.) ``--set`` changes a value in all strategies.

FedAvg runs first, to the target, for at most ``--longest`` virtual seconds. Every other strategy stops at the target or
at four times FedAvg's seconds on the same cluster with the same seed: the ratio is to that run. The seconds are those
of the first commit that reached the target, so a strategy whose accuracy jitters, or that commits often, is lucky a
little earlier. Nothing in the files is tuned to the clusters; where they say 1 over the number of silos they mean five.

What theory says, of time alone: on equal machines no strategy can beat BSP but by shorter rounds. On speeds from 1 to 3
balancing takes ``8 min(v) / sum(v)`` = 0.5 of FedAvg's time; nobody waiting at all gives the same rate of samples.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from plots import bar, beside, figure, in_parallel, markdown_table, print_table, save, write_json

from fedsync.config.cluster import ClusterConfig
from fedsync.config.locate import locate
from fedsync.config.strategy import StrategyConfig
from fedsync.core.errors import FedSyncError
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
    from fedsync.sim.run import run_virtual

    stop = f"stop={{seconds: {job.seconds}, target_accuracy: {job.target}}}"
    row: dict[str, Any] = {"strategy": job.strategy, "cluster": job.cluster, "seed": job.seed, "limit_s": job.seconds}
    began = time.perf_counter()
    try:
        config = StrategyConfig.load(job.strategy, [*job.sets, f"seed={job.seed}", stop])
        with tempfile.TemporaryDirectory() as folder:
            summary = run_virtual(config, ClusterConfig.load(job.cluster), Path(folder), listeners=[Patience()])
    except (FedSyncError, TimeoutError) as error:
        return row | {"failed": f"{type(error).__name__}: {error}", "seconds_to_target": None}
    keys = ("seconds_to_target", "seconds", "accuracy", "utilisation", "wait_fraction", "rounds", "samples")
    return row | {key: summary[key] for key in keys} | {"wall_s": time.perf_counter() - began}


def strategies() -> list[str]:
    """Names of all shipped ones, the reference first."""
    names = sorted(path.stem for path in locate(REFERENCE).parent.glob("*.yaml"))
    return [REFERENCE, *(name for name in names if name != REFERENCE)]


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


def cells(rows: list[dict[str, Any]], cluster: str, name: str) -> tuple[str, str, str, str]:
    """Seconds, ratio, utilisation and waiting of one strategy on one cluster, as text."""
    mine = [row for row in rows if (row["cluster"], row["strategy"]) == (cluster, name)]
    done = [row for row in mine if "failed" not in row]
    if not done:
        return f"failed {len(mine)}/{len(mine)}", "-", "-", "-"
    reached = [row for row in done if row["seconds_to_target"] is not None]
    seconds = f"{fmean(row['seconds_to_target'] for row in reached):.1f}" if reached else ""
    ratio = f"{fmean(row['ratio'] for row in reached):.2f}" if reached else "-"
    missed = len(mine) - len(reached)
    seconds = f"{seconds} missed {missed}/{len(mine)}".strip() if missed else seconds
    utilisation, waiting = (fmean(row[key] for row in done) for key in ("utilisation", "wait_fraction"))
    return seconds, ratio, f"{utilisation:.0%}", f"{max(waiting, 0.0):.1%}"


def show(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    names = list(dict.fromkeys(row["strategy"] for row in rows))
    columns = ["strategy"]
    for cluster in options.clusters:
        columns += [f"{cluster}\nseconds", "ratio", "util.", "wait"]
    body = [[name, *(cell for c in options.clusters for cell in cells(rows, c, name))] for name in names]
    print_table(
        f"Virtual seconds to accuracy {options.target:g}, {options.seeds} seed(s); ratio to FedAvg, seed by seed",
        columns,
        body,
    )
    if options.markdown:
        print(markdown_table([column.replace("\n", ", ") for column in columns], body))
    for row in rows:
        if "failed" in row:
            print(f"{row['strategy']} on {row['cluster']}, seed {row['seed']}: {row['failed']}")
    made, (ax,) = figure(width=7.5, height=0.42 * len(names) + 1.4)
    places = range(len(names))
    high = 0.8 / len(options.clusters)
    for index, cluster in enumerate(options.clusters):
        for place, name in zip(places, names, strict=True):
            mine = [row for row in rows if (row["cluster"], row["strategy"]) == (cluster, name)]
            reached = [row["ratio"] for row in mine if row["ratio"] is not None]
            at = place + (index - (len(options.clusters) - 1) / 2) * high
            label = cluster if place == 0 else None
            ax.barh(at, fmean(reached) if reached else 0.0, 0.92 * high, **bar(index), label=label)
            if len(reached) < len(mine):
                end = fmean(reached) if reached else 0.0
                ax.text(end + 0.03, at, f"missed {len(mine) - len(reached)}/{len(mine)}", fontsize=6, va="center")
    ax.axvline(1.0, color="black", linewidth=0.8, linestyle="--")
    ax.set(yticks=list(places), yticklabels=names, xlabel="seconds to target / FedAvg's (less is better)")
    ax.set_title(f"Time to accuracy {options.target:g}, FedAvg on the same cluster = 1")
    ax.invert_yaxis()
    ax.legend(fontsize=7, frameon=False, loc="lower right")
    save(made, beside(options.out))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--target", type=float, default=0.9)
    parser.add_argument("--longest", type=float, default=400.0, help="virtual seconds that FedAvg may take")
    parser.add_argument("--clusters", nargs="+", default=list(CLUSTERS))
    parser.add_argument("--strategies", nargs="+", default=strategies())
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="in all strategies")
    parser.add_argument("--quick", action="store_true", help="one seed, target 0.6: to see that it works")
    parser.add_argument("--markdown", action="store_true", help="the table once more, for a page")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("bench/results/time_to_target.json"))
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.target = 1, min(options.target, 0.6)
    began = time.perf_counter()
    rows = measure(options)
    write_json(options.out, {"target": options.target, "wall_s": time.perf_counter() - began, "runs": rows})
    show(rows, options)
    print(f"{time.perf_counter() - began:.0f} s of real time")


if __name__ == "__main__":
    main()
