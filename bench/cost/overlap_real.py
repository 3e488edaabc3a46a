"""Overlap on real processes: seconds a round and the share of time in which silos compute, with and without it.

    python bench/cost/overlap_real.py [--silos 2] [--train 1.5] [--travel 1.5] [--rounds 12] [--pairs 1] [--quick]

Two runs of `fedsync run --runtime local` alternate: BSP, and BSP with an order queued at each silo. Silos emulate a
speed at which an order trains for ``--train`` seconds, and a connection on which model and update together take
``--travel``. A round also has the costs of real processes: messages, the aggregation, files. The measurement starts at
the second commit and ends at the last one. The table also has the same silos in virtual time, without these costs.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from bench.common import alternated, markdown_table, print_table, write_json
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Commit
from fedsync.core.events import UpdateArrived
from fedsync.core.journal import JOURNAL, read_journal
from fedsync.ops.local import run_local
from fedsync.simulation.run import run_virtual

BARRIERS = {"bsp": "{kind: bsp}", "overlap": "{kind: overlap, inner: {kind: bsp}}"}
STEPS, BATCH, FIRST = 10, 8, 2
HIDDEN = (500, 100)
BYTES = 4 * sum((before + 1) * after for before, after in zip((784, *HIDDEN), (*HIDDEN, 10), strict=True))
"""Of the model, as of an update."""

LATENCY_S = 0.05
COLUMNS = ("barrier", "real: s a round", "computing", "virtual: s a round", "computing")


@dataclass(frozen=True, slots=True)
class OverlapCost:
    """One run: seconds a round from commit `FIRST` to the last one, and the share of that in which silos computed."""

    barrier: str
    runtime: str
    round_s: float
    computing: float


def silos_of(options: argparse.Namespace) -> ClusterConfig:
    """Machines on which an order trains and travels for so long."""
    speed, byte_s = STEPS * BATCH / options.train, (options.travel / 2 - LATENCY_S) / BYTES
    line = {"latency_s": LATENCY_S, "bandwidth_mbps": 8e-6 / byte_s}
    silos = [{"name": f"silo-{number}", "speed": speed, **line} for number in range(options.silos)]
    return ClusterConfig.model_validate({"silos": silos})


def run(barrier: str, runtime: str, options: argparse.Namespace) -> OverlapCost:
    settings = [
        f"barrier={BARRIERS[barrier]}",
        f"local={{steps: {STEPS}, batch_size: {BATCH}, threads: 1}}",
        f"stop={{rounds: {options.rounds}}}",
        f"task={{kind: mlp, data: {{kind: digits28}}, hidden: {list(HIDDEN)}}}",
    ]
    config = StrategyConfig.load("fedavg", settings)
    with tempfile.TemporaryDirectory(prefix="overlap-") as folder:
        (run_local if runtime == "local" else run_virtual)(config, silos_of(options), Path(folder))
        return measured(barrier, runtime, Path(folder) / JOURNAL)


def measured(barrier: str, runtime: str, journal: Path) -> OverlapCost:
    entries = list(read_journal(journal)[1])
    commits = [entry.at_s for entry in entries for action in entry.actions if isinstance(action, Commit)]
    begin_s, end_s = commits[FIRST - 1], commits[-1]
    came = [event for entry in entries for event in entry.events if isinstance(event, UpdateArrived)]
    computed_s = sum(event.report.compute_s for event in came if begin_s < event.at_s <= end_s)
    silos = len({event.meta.silo for event in came})
    return OverlapCost(
        barrier, runtime, (end_s - begin_s) / (len(commits) - FIRST), computed_s / (silos * (end_s - begin_s))
    )


def mean(rows: Sequence[OverlapCost]) -> OverlapCost:
    first = rows[0]
    return OverlapCost(
        first.barrier, first.runtime, fmean(row.round_s for row in rows), fmean(row.computing for row in rows)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--silos", type=int, default=2)
    parser.add_argument("--train", type=float, default=1.5, help="seconds that an order trains")
    parser.add_argument("--travel", type=float, default=1.5, help="seconds that its model and its update travel")
    parser.add_argument("--rounds", type=int, default=14)
    parser.add_argument("--pairs", type=int, default=1, help="runs of each side")
    parser.add_argument("--quick", action="store_true", help="four short rounds")
    parser.add_argument("--out", type=Path, default=Path("bench/results/overlap_real.json"))
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.train, options.travel = 4, 0.3, 0.3
    real = alternated(lambda: run("bsp", "local", options), lambda: run("overlap", "local", options), options.pairs)
    virtual = [run(barrier, "virtual", options) for barrier in BARRIERS]
    rows = [mean(side) for side in real]
    write_json(options.out, [asdict(row) for row in (*real[0], *real[1], *virtual)])
    cells = [
        [one.barrier, f"{one.round_s:.2f}", f"{one.computing:.0%}", f"{other.round_s:.2f}", f"{other.computing:.0%}"]
        for one, other in zip(rows, virtual, strict=True)
    ]
    title = f"{options.silos} silos, {options.train:g} s of training and {options.travel:g} s of travelling an order"
    print_table(title, COLUMNS, cells)
    print(markdown_table(COLUMNS, cells))
    print(
        f"overlap takes {rows[1].round_s / rows[0].round_s:.2f} of the seconds, by virtual time "
        f"{virtual[1].round_s / virtual[0].round_s:.2f}"
    )


if __name__ == "__main__":
    main()
