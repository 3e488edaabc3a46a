"""FSP: waiting times of its silos, and quality of the intervals that it chooses.

    python bench/papers/fsp.py [--seeds 3] [--quick] [--out FILE.json]

Waiting. On ``contention.yaml`` FedAvg waits for silos that others slow down. FSP's silos all stop at the deadline, to
within a part of a local step. A step of 32 samples takes 0.11 s at full speed and 0.36 s in contention, so an end is up
to 0.2 s off, and a silo waits a little under 0.1 s in every interval. The position of the deadline between two steps
of the slowed silos matters as much, so the interval is also moved by up to 0.3 s; the mean and the worst are shown. A
round also ends when the first silo has been through its 180 digits ``passes`` times, which takes 0.6 s a pass at full
speed. The rows allow 20 passes, so the interval bounds a round. Nothing is trained.

Interval. As in FSP, section 6.5: a sweep of fixed intervals against those that the policies choose, by virtual
seconds to a target accuracy in real training. An order costs 1 s besides training here; otherwise the shortest interval
would be the best. The barrier allows no interval below twice the overhead. Non-i.i.d. digits, as shipped; the policies
get the bounds of the sweep. Results of seeds differ by a factor of two, so there are more seeds.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import fmean, median
from typing import Any

from bench.common import beside, figure, in_parallel, line, print_table, save, write_json
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.extras.report.style import COLOURS, HATCHES

EXAMPLES = 180
"""Training digits of a silo: 1,437 over 8."""
PASSES = 20
WAITING = (1.0, 2.0, 3.0, 4.0, 6.0)
SHIFTS = (-0.3, -0.2, -0.1, 0.0, 0.1, 0.2, 0.3)
SWEEP = (2.0, 2.5, 3.0, 4.0, 6.0, 8.0)
CHOSEN = (
    "{kind: climb, floor_s: 2.0, ceiling_s: 8.0}",
    "{kind: binary, interval_s: 4.0, floor_s: 2.0}",
    "{kind: linear, interval_s: 2.0, floor_s: 2.0, ceiling_s: 8.0}",
)


def contention(**changes: Any) -> ClusterConfig:
    plain = [silo.model_dump(exclude_defaults=True) | changes for silo in ClusterConfig.load("contention").silos]
    return ClusterConfig.model_validate({"silos": plain})


def barrier(interval: str) -> list[str]:
    return [
        f"barrier={{kind: fsp, passes: {PASSES}, overrun: 0.25, interval: {interval}}}",
        "aggregation={kind: fednova}",
    ]


def waiting_run(job: tuple[str, float | None, int, float]) -> dict[str, Any]:
    """Without training."""
    from fedsync.simulation.timing_only import run_timing

    name, interval_s, seed, seconds = job
    sets = [] if interval_s is None else barrier(f"{{kind: fixed, interval_s: {interval_s}}}")
    config = StrategyConfig.load(name, [*sets, f"stop={{seconds: {seconds}}}", f"seed={seed}"])
    with tempfile.TemporaryDirectory() as folder:
        summary = run_timing(config, contention(examples=EXAMPLES), Path(folder), journal=False)
    mean_s = summary["seconds"] / summary["rounds"]
    kept = {key: summary[key] for key in ("wait_fraction", "utilisation")}
    return {"strategy": name, "interval_s": interval_s, "seed": seed, "round_s": mean_s, **kept}


def target_run(job: tuple[str, float, int, float]) -> dict[str, Any]:
    """With training."""
    from fedsync.observe.replay import read_ledger
    from fedsync.simulation.run import run_virtual

    interval, target, seed, seconds = job
    stop = f"stop={{seconds: {seconds}, target_accuracy: {target}}}"
    config = StrategyConfig.load("fedavg", [*barrier(interval), stop, f"seed={seed}"])
    with tempfile.TemporaryDirectory() as folder:
        summary = run_virtual(config, contention(overhead_s=1.0), Path(folder))
        rounds = read_ledger(Path(folder) / "journal.jsonl").rounds
    lengths = [row.seconds for row in rounds]
    kept = {key: summary[key] for key in ("seconds_to_target", "accuracy", "wait_fraction")}
    return {"interval": interval, "seed": seed, "limit_s": seconds, "rounds_s": lengths, **kept}


def waiting(options: argparse.Namespace) -> list[dict[str, Any]]:
    seconds, intervals = (60.0, (1.0, 4.0)) if options.quick else (600.0, WAITING)
    seeds = range(7, 7 + options.seeds)
    jobs: list[tuple[str, float | None, int, float]] = [(n, None, s, seconds) for n in ("fedavg", "fsp") for s in seeds]
    jobs += [("fedavg", round(i + shift, 2), s, seconds) for i in intervals for shift in SHIFTS for s in seeds]
    runs = in_parallel(waiting_run, jobs, options.processes)

    def mean(strategy: str, interval_s: float | None) -> dict[str, float]:
        mine = [run for run in runs if (run["strategy"], run["interval_s"]) == (strategy, interval_s)]
        return {key: fmean(run[key] for run in mine) for key in ("round_s", "wait_fraction", "utilisation")}

    rows = [{"name": n, "interval_s": None} | mean(s, None) for n, s in (("FedAvg", "fedavg"), ("fsp.yaml", "fsp"))]
    for i in intervals:
        near = [mean("fedavg", round(i + shift, 2))["wait_fraction"] for shift in SHIFTS]
        row: dict[str, Any] = {"name": f"FSP, {i:g} s", "interval_s": i, "near": fmean(near), "worst": max(near)}
        rows.append({**row, **mean("fedavg", i)})
    return rows


def sweep(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of means; who misses the target counts with the limit, and it is said how often."""
    fixed = [f"{{kind: fixed, interval_s: {i}}}" for i in ((1.5, 4.0) if options.quick else SWEEP)]
    intervals = [*(CHOSEN[:2] if options.quick else CHOSEN), *reversed(fixed)]
    target, seconds = (0.3, 12.0) if options.quick else (options.target, 150.0)
    seeds = range(7, 7 + (1 if options.quick else options.training_seeds))
    jobs = [(interval, target, seed, seconds) for interval in intervals for seed in seeds]
    runs = in_parallel(target_run, jobs, options.processes)
    rows = []
    for interval in [*fixed, *(i for i in intervals if i not in fixed)]:
        mine = [run for run in runs if run["interval"] == interval]
        row = {
            "interval": interval,
            "fixed": interval in fixed,
            "seconds": fmean(run["seconds_to_target"] or run["limit_s"] for run in mine),
            "median": median(run["seconds_to_target"] or run["limit_s"] for run in mine),
            "least": min(run["seconds_to_target"] or run["limit_s"] for run in mine),
            "most": max(run["seconds_to_target"] or run["limit_s"] for run in mine),
            "missed": sum(run["seconds_to_target"] is None for run in mine),
            "round_s": fmean(fmean(run["rounds_s"]) for run in mine),
            "wait_fraction": fmean(run["wait_fraction"] for run in mine),
            "runs": mine,
        }
        rows.append(row)
    best = min(row["seconds"] for row in rows if row["fixed"])
    for row in rows:
        row["over_best"] = row["seconds"] / best - 1
    return rows


def name_of(row: dict[str, Any]) -> str:
    words = dict(word.split(": ") for word in row["interval"].strip("{}").split(", "))
    begin_s = float(words.get("interval_s") or words["floor_s"])
    return f"{words['kind']}, {begin_s:g} s" + ("" if row["fixed"] else " to begin with")


def show(waits: list[dict[str, Any]], rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    print_table(
        f"Waiting on contention.yaml, {options.seeds} seed(s), nothing trained",
        ("", "mean round [s]", "waiting", "within 0.3 s, mean", "worst", "utilisation"),
        [
            (
                w["name"],
                f"{w['round_s']:.2f}",
                f"{w['wait_fraction']:.1%}",
                *((f"{w['near']:.1%}", f"{w['worst']:.1%}") if "near" in w else "--"),
                f"{w['utilisation']:.1%}",
            )
            for w in waits
        ],
    )
    print_table(
        f"Virtual seconds to {options.target:g}, contention.yaml with 1 s overhead, {len(rows[0]['runs'])} seed(s)",
        (
            "interval",
            "mean round [s]",
            "seconds",
            "median",
            "least to most",
            "over the best fixed",
            "missed",
            "waiting",
        ),
        [
            (
                name_of(row),
                f"{row['round_s']:.2f}",
                f"{row['seconds']:.1f}",
                f"{row['median']:.1f}",
                f"{row['least']:.0f} to {row['most']:.0f}",
                f"{row['over_best']:+.0%}",
                f"{row['missed']}/{len(row['runs'])}",
                f"{row['wait_fraction']:.1%}",
            )
            for row in rows
        ],
    )
    made, (left, right) = figure(2)
    fsp = [wait for wait in waits if wait["interval_s"] is not None]
    left.plot(
        [w["interval_s"] for w in fsp], [100 * w["wait_fraction"] for w in fsp], **line(0), label="FSP, 20 passes"
    )
    for index, wait in enumerate(waits[:2], start=1):
        style = line(index, marker=False)
        left.axhline(100 * wait["wait_fraction"], **style, label=f"{wait['name']}, rounds of {wait['round_s']:.1f} s")
    left.axhline(3, **line(6, marker=False), label="demand: 3 %")
    left.set(title="Waiting under contention", xlabel="interval [s]", ylabel="share of time waited [%]")
    left.set_ylim(0, 1.35 * left.get_ylim()[1])
    left.legend(fontsize=7, frameon=False, ncols=2)
    fixed = [row for row in rows if row["fixed"]]
    lengths = [float(row["interval"].split("interval_s: ")[1].strip("}")) for row in fixed]
    best = min(row["seconds"] for row in fixed)
    right.plot(lengths, [row["seconds"] for row in fixed], **line(0), label="fixed")
    right.axhspan(best, 1.1 * best, color="#BBBBBB", alpha=0.5, label="within 10 % of the best", hatch=HATCHES[1])
    for index, row in enumerate((row for row in rows if not row["fixed"]), start=1):
        style = line(index) | {"linestyle": "", "color": COLOURS[index], "markersize": 7}
        right.plot([row["round_s"]], [row["seconds"]], **style, label=name_of(row))
    right.set(title="Time to the target", xlabel="interval; where chosen: mean round [s]", ylabel="virtual time [s]")
    right.set_ylim(0, 1.1 * right.get_ylim()[1])
    right.legend(fontsize=7, frameon=False)
    save(made, beside(options.out))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--training-seeds", type=int, default=8)
    parser.add_argument("--target", type=float, default=0.9)
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it works")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("bench/results/fsp.json"))
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.target = 1, 0.3
    waits, rows = waiting(options), sweep(options)
    write_json(options.out, {"waiting": waits, "target": options.target, "sweep": rows})
    show(waits, rows, options)


if __name__ == "__main__":
    main()
