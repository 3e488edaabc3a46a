"""FSP against BSP on the paper's workloads, with and without stragglers (cf. FSP, figures 7 to 10).

    python bench/papers/fsp_workloads.py [--seeds 1] [--parts workloads scaling] [--quick] [--out FILE.json]

K-means, a Gaussian mixture, logistic regression, matrix factorisation and a CNN, trained for real on 16 silos with
equal shares of i.i.d. data. One pass of a silo over its data takes one virtual second, an order 0.05 s besides. With
stragglers four silos are 8 times as slow: 1,050 s for 122 s is what the paper's own four cost k-means (section 1; its
injected ones are set to match). The models are the paper's, section 6.1:

- BSP, full batch (BSPB): a round is one step on all data. For the first, second and fourth workload that is exactly
  one iteration of expectation maximisation, or alternating least squares.
- BSP, mini-batch (BSPV): a round is a share of a pass. The paper's searches for the size when it begins; here all sizes
  run and the best is shown.
- FSP, binary (FSPB): an interval that begins with a whole pass and is halved while that pays.
- FSP, linear (FSPV): the best interval by a line through two trials, stage by stage.

Two more rows: "FSP, climb" is FedSync's own choice of an interval, and "BSP, a pass" a round of one pass in small
steps. All but BSPB take local steps, so a comparison with full batches alone could not separate the effect of local
steps from that of FSP. (The paper's workers sum gradients at fixed parameters until the barrier.) Learning rates are
the same for all models of a workload with gradients. Where the model is statistics, a small batch moves them by a
tenth only. Updates count by their samples, as the paper's sums do.

The target is 95 % of the decrease that a fixed number of full batches reaches. Figure 11 has no counterpart: it moves
data between workers, which silos do not, and tests semi-centralised coordination, which FSP always has here.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.common import beside, figure, in_parallel, line, print_table, save, write_json
from bench.papers.objective import Job, retimed, run, target_of

SILOS = 16
STRAGGLERS = 4
SLOWER = 8.0
OVERHEAD_S = 0.05
LIMIT_S = 20.0
PARTS = ("workloads", "scaling")
SHARES = (1, 4, 16)
FEW = 20
"""Points of a curve that are marked one by one."""
FULL, MINI, PASS, CLIMB = "BSP, full batch", "BSP, mini-batch", "BSP, a pass", "FSP, climb"
INTERVALS = {
    "FSP, binary": "{kind: binary, interval_s: 1.0, floor_s: 0.1}",
    "FSP, linear": "{kind: linear, interval_s: 0.2, stage_s: 10.0, floor_s: 0.1, ceiling_s: 1.0}",
    CLIMB: "{kind: climb, floor_s: 0.1, ceiling_s: 1.0}",
}
MODELS = (FULL, PASS, MINI, *INTERVALS)
SHARE_NAMES = {"1": "a pass", "4": "a 4th", "16": "a 16th"}
Key = tuple[str, ...]
Rows = dict[Key, dict[str, Any]]
Clusters = dict[str, tuple[float, int]]
"""How much slower the stragglers are, and their number, by name."""
EVEN: Clusters = {"even": (1.0, 0)}
CLUSTERS: Clusters = {"stragglers": (SLOWER, STRAGGLERS), **EVEN}
SCALES: dict[str, Clusters] = {
    "4 of 16 silos, so many times as slow": {
        "1": (1.0, 0),
        "4": (4.0, STRAGGLERS),
        "8": (SLOWER, STRAGGLERS),
        "16": (16.0, STRAGGLERS),
    },
    "so many of 16 silos 8 times as slow": {
        "0": (1.0, 0),
        "2": (SLOWER, 2),
        "4": (SLOWER, STRAGGLERS),
        "8": (SLOWER, 8),
        "12": (SLOWER, 12),
    },
}


@dataclass(frozen=True)
class Workload:
    """What is trained.

    Args:
        task: of the strategy file.
        examples: training samples of a silo; a pass over them takes a second.
        batch: samples of a small step.
        full_rate: learning rate of full batches.
        rate: learning rate of small batches.
        iterations: full batches that set the target.
    """

    task: str
    examples: int
    batch: int
    full_rate: float
    rate: float
    iterations: int

    def cut(self) -> Workload:
        """An eighth of the generated data, and over before much is learnt: to see that it works."""
        examples = self.examples // 8 if GENERATED in self.task else self.examples
        return replace(
            self, task=self.task.replace(GENERATED, f"{int(GENERATED) // 8}"), examples=examples, iterations=2
        )


GENERATED = "10240"
"""Samples of generated data; a fifth of them is for tests."""
_BLOBS = "{{kind: blobs, samples: 10240, blobs: {}, features: {}, apart: {}}}"
WORKLOADS = {
    "k-means": Workload(f"{{kind: k-means, clusters: 16, data: {_BLOBS.format(16, 8, 1.5)}}}", 512, 8, 1.0, 0.1, 40),
    "mixture": Workload(
        f"{{kind: gaussian-mixture, components: 8, data: {_BLOBS.format(8, 6, 1.5)}}}", 512, 8, 1.0, 0.1, 12
    ),
    "logistic": Workload(f"{{kind: linear, loss: logistic, data: {_BLOBS.format(4, 28, 0.3)}}}", 512, 8, 0.1, 0.1, 300),
    "factorisation": Workload(
        "{kind: factorisation, factors: 4, data: {kind: ratings, users: 10240, items: 40, rank: 4, known: 0.3}}",
        512,
        8,
        1.0,
        0.1,
        10,
    ),
    "CNN": Workload("{kind: digits, partition: {kind: iid}}", 90, 2, 0.05, 0.05, 150),
}


def silos(workload: Workload, slow: float, number: int) -> tuple[dict[str, Any], ...]:
    """``number`` stragglers, which are first, as in the paper's figure 10."""
    speeds = [workload.examples / (slow if silo < number else 1.0) for silo in range(SILOS)]
    return tuple(
        {"name": f"{silo}", "speed": speed, "jitter": 0.02, "overhead_s": OVERHEAD_S}
        for silo, speed in enumerate(speeds, start=1)
    )


def sets_of(workload: Workload, model: str, share: int, seed: int) -> tuple[str, ...]:
    """Changes to ``bsp.yaml`` that make it a workload's model."""
    barrier, steps = "{kind: bsp}", 1
    size, rate = workload.batch, workload.rate
    if model == FULL:
        size, rate = workload.examples, workload.full_rate
    elif model in INTERVALS:
        barrier = f"{{kind: fsp, passes: 1.0, overrun: 0.25, interval: {INTERVALS[model]}}}"
    else:
        steps = max(workload.examples // workload.batch // share, 1)
    return (
        f"task={workload.task}",
        f"local={{steps: {steps}, batch_size: {size}, learning_rate: {rate}}}",
        f"barrier={barrier}",
        "aggregation={kind: fedavg, weight: samples}",
        f"seed={seed}",
    )


def job_of(key: Key, clusters: Clusters, chosen: dict[str, Workload], **limits: Any) -> Job:
    """The run of a cluster, workload, model, share of a pass and seed."""
    cluster, name, model, share, seed = key
    sets = sets_of(chosen[name], model, int(share), int(seed))
    return Job(key, "bsp", sets, silos(chosen[name], *clusters[cluster]), **limits)


def synchronous(chosen: dict[str, Workload], seeds: list[str], processes: int) -> Rows:
    """The BSP models, each trained once on even machines: full batches first, for they set the target."""
    first = [("even", name, FULL, "0", seed) for name in chosen for seed in seeds]
    jobs = [job_of(key, EVEN, chosen, seconds=0.0, rounds=chosen[key[1]].iterations) for key in first]
    rows = {}
    for job, row in zip(jobs, in_parallel(run, jobs, processes), strict=True):
        rows[job.key] = retimed(row, replace(job, target=target_of(row["curve"])))
    keys = [("even", name, PASS, str(share), seed) for name in chosen for share in SHARES for seed in seeds]
    jobs = [
        job_of(key, EVEN, chosen, seconds=LIMIT_S, target=rows["even", key[1], FULL, "0", key[4]]["target"])
        for key in keys
    ]
    return rows | {job.key: row for job, row in zip(jobs, in_parallel(run, jobs, processes), strict=True)}


def everything(
    chosen: dict[str, Workload], clusters: Clusters, trained: Rows, seeds: list[str], processes: int
) -> Rows:
    """All models on these clusters: what was trained by BSP is timed anew, FSP is trained."""
    rows = {}
    for old, row in trained.items():
        for cluster in clusters:
            key = (cluster, *old[1:])
            rows[key] = retimed(row, job_of(key, clusters, chosen, seconds=LIMIT_S, target=row["target"]))
            # What missed the target on even machines would have missed it on any.
            rows[key]["limit_s"] = rows[key]["curve"][-1][0]
    keys = [
        (cluster, name, model, "0", seed)
        for name in chosen
        for model in INTERVALS
        for cluster in clusters
        for seed in seeds
    ]
    jobs = [
        job_of(key, clusters, chosen, seconds=LIMIT_S, target=trained["even", key[1], FULL, "0", key[4]]["target"])
        for key in keys
    ]
    return rows | {job.key: row for job, row in zip(jobs, in_parallel(run, jobs, processes), strict=True)}


def table_of(rows: Rows, seeds: list[str]) -> list[dict[str, Any]]:
    """One row a cluster, workload and model: means over the seeds, with the better share for a mini-batch."""
    table = []
    for cluster, name in dict.fromkeys(key[:2] for key in rows):
        mine = {key[2:4]: [rows[cluster, name, *key[2:4], seed] for seed in seeds] for key in rows if key[1] == name}
        base = mine[FULL, "0"]
        parts = [row_of((cluster, name, *which), runs, base) for which, runs in mine.items()]
        best = min((row for row in parts if row["model"] == PASS), key=lambda row: (row["missed"], row["ratio"]))
        table += [row for row in parts if row["model"] != PASS or row["share"] == "1"]
        table.append(best | {"model": MINI})
    return table


def row_of(key: Key, mine: list[dict[str, Any]], base: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over seeds; a run that missed the target counts with its limit."""
    seconds = [run["seconds_to"] or run["limit_s"] for run in mine]
    return {
        "cluster": key[0],
        "workload": key[1],
        "model": key[2],
        "share": key[3],
        "seconds": fmean(seconds),
        "ratio": fmean(mine_s / other["seconds_to"] for mine_s, other in zip(seconds, base, strict=True)),
        "missed": sum(run["seconds_to"] is None for run in mine),
        "rounds": fmean(run["commits"] for run in mine),
        "wait_fraction": fmean(run["wait_fraction"] for run in mine),
        "runs": mine,
    }


def show_workloads(table: list[dict[str, Any]], out: Path, seeds: int) -> None:
    """Table, and one panel a cluster and workload."""
    names = list(dict.fromkeys(row["workload"] for row in table))
    found = {(row["cluster"], row["workload"], row["model"]): row for row in table}
    body = []
    for name in names:
        for model in MODELS:
            cells = [f"{name}: {model}"]
            for cluster in CLUSTERS:
                row = found[cluster, name, model]
                missed = f" missed {row['missed']}/{seeds}" if row["missed"] else ""
                share = f"{SHARE_NAMES[row['share']]}: " if model == MINI else ""
                cells += [
                    f"{share}{row['seconds']:.2f}{missed}",
                    f"{row['ratio']:.3f}",
                    f"{row['rounds']:.0f}",
                    f"{row['wait_fraction']:.1%}",
                ]
            body.append(cells)
    print_table(
        f"Virtual seconds to the objective, {seeds} seed(s), with 4 of 16 silos 8 times as slow and on even machines",
        ("", "stragglers", "ratio", "rounds", "waiting", "even", "ratio", "rounds", "waiting"),
        body,
    )
    made, axes = figure(columns=len(names), rows=2, width=3.1, height=2.9)
    for place, (cluster, name) in enumerate((cluster, name) for cluster in CLUSTERS for name in names):
        ax = axes[place]
        for index, model in enumerate(MODELS):
            first = found[cluster, name, model]["runs"][0]
            few = len(first["curve"]) < FEW
            ax.plot(*zip(*first["curve"], strict=True), **line(index, marker=few), label=model)
        ax.axhline(first["target"], color="black", linewidth=0.7)
        ax.set(xscale="log", title=f"{name}, {'stragglers' if cluster == 'stragglers' else 'even machines'}")
        ax.xaxis.set_minor_formatter("")
        ax.set_xlim(0.1, 1.1 * found[cluster, name, FULL]["runs"][0]["curve"][-1][0])
        if place % len(names) == 0:
            ax.set_ylabel("test loss")
        if place >= len(names):
            ax.set_xlabel("virtual time [s]")
    axes[0].legend(fontsize=6, frameon=False)
    save(made, beside(out))


def show_scaling(table: list[dict[str, Any]], out: Path) -> None:
    """Figure 9's tables and panels, where who missed is at the limit, and figure 10b's waiting of every silo."""
    found = {(row["cluster"], row["model"]): row for row in table}
    models = [model for model in MODELS if model != PASS]
    made, axes = figure(columns=3, width=4.2, height=3.2)
    for ax, (title, clusters) in zip(axes, SCALES.items(), strict=False):
        body = []
        for index, model in enumerate(models):
            rows = [found[cluster_name(*cluster), model] for cluster in clusters.values()]
            body.append((model, *(f"{row['seconds']:.2f}{' missed' if row['missed'] else ''}" for row in rows)))
            values = [float(value) for value in clusters]
            ax.plot(values, [row["seconds"] for row in rows], **line(index), label=model)
        print_table(f"K-means, virtual seconds to the objective: {title}", ("", *clusters), body)
        ax.set(yscale="log", title=title, xticks=values, ylabel="virtual time to the objective [s]")
    for index, model in enumerate(models):
        waits = found[cluster_name(SLOWER, STRAGGLERS), model]["runs"][0]["waits"]
        ordered = sorted(waits, key=int)
        axes[2].plot([int(n) for n in ordered], [100 * waits[n] for n in ordered], **line(index), label=model)
    axes[2].set(
        title="silos 1 to 4 are 8 times as slow",
        xlabel="silo",
        ylabel="share of time waited [%]",
        xticks=(1, 4, 8, 12, 16),
    )
    axes[2].legend(fontsize=7, frameon=False, loc="center right")
    save(made, beside(out, "-scaling"))


def cluster_name(slow: float, number: int) -> str:
    """A cluster of the scaling part."""
    return f"{slow:g} {number}"


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it works")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("bench/results/fsp_workloads.json"))
    options = parser.parse_args()
    chosen = {name: WORKLOADS[name] for name in options.workloads}
    if options.quick:
        chosen, options.seeds = {name: workload.cut() for name, workload in chosen.items()}, 1
    seeds = [str(seed) for seed in range(7, 7 + options.seeds)]
    began = time.perf_counter()
    trained = synchronous(chosen, seeds, options.processes)
    results: dict[str, Any] = {}
    if "workloads" in options.parts:
        rows = everything(chosen, CLUSTERS, trained, seeds, options.processes)
        results["workloads"] = table_of(rows, seeds)
        show_workloads(results["workloads"], options.out, options.seeds)
    if "scaling" in options.parts and "k-means" in chosen:
        clusters = {cluster_name(*cluster): cluster for scale in SCALES.values() for cluster in scale.values()}
        one = {key: row for key, row in trained.items() if key[1] == "k-means" and key[4] == seeds[0]}
        rows = everything({"k-means": chosen["k-means"]}, clusters, one, seeds[:1], options.processes)
        results["scaling"] = table_of(rows, seeds[:1])
        show_scaling(results["scaling"], options.out)
    write_json(options.out, results)
    print(f"{time.perf_counter() - began:.0f} s of real time")


if __name__ == "__main__":
    main()
