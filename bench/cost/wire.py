"""Accuracy and bytes of runs with fewer bits per sent value: `wire` of a strategy file.

    python bench/cost/wire.py [--quick] [--processes N] [--out FILE.json]

LB-BSP on non-i.i.d. digits (two classes a silo) in virtual time: 24 rounds, and for each of 20 seeds the same run with
every format. The silos have 360 test samples, so one more correct is 0.28 points. Training is chaotic: a different last
bit changes the end result. So a run's accuracy is the mean over its last ten versions; the last version's is shown
beside it. A format's difference to float32 is paired by seed. Its 90 % interval is that of two one-sided t-tests at
5 %: formats are *equivalent* to float32 within a margin if the whole interval lies within it. The margins are 0.1
points for bfloat16 and 0.3 for int8 with feedback; they were set before the first run.

"No feedback": silos forget the rounding error of an update, instead of adding it to the next update. ``loss`` is the
norm of this error over that of the update.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from bench.common import in_parallel, print_table, write_json
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.model.plain_replica import LOST
from fedsync.model.plain_wire import Int8, TopK
from fedsync.observe.replay import read_ledger
from fedsync.simulation.run import run_virtual

ROUNDS, SEEDS, LAST, FIRST_SEED = 24, 20, 10, 7
PLAIN = "fp32"
FORMATS = {
    PLAIN: "{}",
    "bf16": "{up: bf16, down: bf16}",
    "int8": "{up: int8, down: int8}",
    "int8, no feedback": "{up: int8, down: int8}",
    "top-k 5 %": "{up: bf16, top_k: 0.05, down: int8}",
    "top-k 5 %, no feedback": "{up: bf16, top_k: 0.05, down: int8}",
}
MARGINS = {"bf16": 0.1, "int8": 0.3}
"""Points within which a format is to be equivalent."""


def run(job: tuple[str, int, int]) -> dict[str, Any]:
    name, seed, rounds = job
    for kind in (Int8, TopK):
        kind.feedback = "no feedback" not in name  # of this process, for this run
    overrides = [f"seed={seed}", f"stop.rounds={rounds}", f"wire={FORMATS[name]}"]
    with tempfile.TemporaryDirectory() as folder:
        summary = run_virtual(StrategyConfig.load("lb-bsp", overrides), ClusterConfig.load("hetero"), Path(folder))
        rows = read_ledger(Path(folder) / "journal.jsonl").rounds
    return {
        "format": name,
        "seed": seed,
        "accuracy": [row.accuracy for row in rows if row.accuracy is not None],
        "last": summary["accuracy"],
        "bytes_up": summary["bytes_up"] / rounds,
        "bytes_down": summary["bytes_down"] / rounds,
        "loss": summary["metrics"].get(LOST, 0.0),
    }


def compared(name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """A format against float32: differences in points, paired by seed, and bytes."""
    mine = [each for each in runs if each["format"] == name]
    plain = {each["seed"]: each for each in runs if each["format"] == PLAIN}
    late = [100 * float(np.mean(each["accuracy"][-LAST:])) for each in mine]
    differences = [
        value - 100 * float(np.mean(plain[each["seed"]]["accuracy"][-LAST:]))
        for value, each in zip(late, mine, strict=True)
    ]
    of_last = [100 * (each["last"] - plain[each["seed"]]["last"]) for each in mine]
    means = {key: float(np.mean([each[key] for each in mine])) for key in ("bytes_up", "bytes_down", "loss")}
    return {
        "format": name,
        "accuracy": float(np.mean(late)),
        "difference": interval(differences),
        "difference_of_last": interval(of_last),
        "margin": MARGINS.get(name),
        **means,
    }


def interval(differences: list[float]) -> list[float]:
    """Mean of differences, and both ends of its 90 % interval."""
    mean, count = float(np.mean(differences)), len(differences)
    if count < 2:
        return [mean, float("-inf"), float("inf")]
    half = float(stats.t.ppf(0.95, count - 1) * np.std(differences, ddof=1) / np.sqrt(count))
    return [mean, mean - half, mean + half]


def verdict(row: dict[str, Any]) -> str:
    """Whether the interval lies within the margin; by how much it does not."""
    if row["margin"] is None:
        return "-"
    beyond = max(-row["difference"][1], row["difference"][2]) - row["margin"]
    return f"within {row['margin']}" if beyond <= 0 else f"beyond {row['margin']} by {beyond:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it works")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("bench/results/wire.json"))
    options = parser.parse_args()
    rounds, seeds = (3, 2) if options.quick else (ROUNDS, SEEDS)
    jobs = [(name, FIRST_SEED + seed, rounds) for seed in range(seeds) for name in FORMATS]
    runs = in_parallel(run, jobs, options.processes)
    rows = [compared(name, runs) for name in FORMATS]
    columns = ("format", "accuracy [%]", "to fp32 [points]", "90 % interval", "last version alone", "margin", "loss")
    cells = [
        (row["format"], f"{row['accuracy']:.2f}", *_told(row["difference"]), " ".join(_told(row["difference_of_last"])),
         verdict(row), f"{row['loss']:.4f}", f"{row['bytes_up'] / 1e3:.1f}", f"{row['bytes_down'] / 1e3:.1f}")
        for row in rows
    ]  # fmt: skip
    title = f"LB-BSP, non-i.i.d. digits, {rounds} rounds, mean of the last {LAST} versions, {seeds} seeds"
    print_table(title, (*columns, "kB up a round", "kB down"), cells)
    write_json(options.out, {"rounds": rounds, "seeds": seeds, "formats": rows, "runs": runs})


def _told(values: list[float]) -> tuple[str, str]:
    return f"{values[0]:+.2f}", f"{values[1]:+.2f} .. {values[2]:+.2f}"


if __name__ == "__main__":
    main()
