"""Rounds that four hospitals' privacy budgets last, with batches by budget, by speed, and of equal size.

    python bench/privacy/balanced_budgets.py [--quick] [--out FILE.json]

The tables and the accuracy are those of ``private_heart.py``; the noise multiplier is the same at all hospitals and in
all cells. A run continues until the last budget is spent. Time is virtual.

| case | budgets | speeds |
|---|---|---|
| differ | one hospital has eight times the epsilon of another | equal |
| alike | equal; only the numbers of rows differ | equal |
| slow | as ``differ`` | the hospital with the largest budget is the slowest |

`spend-evenly` helps where budgets, or numbers of rows, differ. Speeds do not matter to it: the barrier of ``lb-bsp``
ends rounds on time, so a slow hospital does fewer steps and spends less than its batch would cost.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

from bench.common import print_table, write_json
from bench.privacy.private_heart import HOSPITALS, accuracy, interval, strategy, tables
from fedsync import replay
from fedsync.common.errors import RunError
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Commit
from fedsync.core.events import SiloLost
from fedsync.simulation.run import run_virtual

NOISE, DELTA, RATE, MOST = 6.0, 1e-3, 0.5, 400
UNEQUAL = dict(zip(HOSPITALS, (0.5, 1.0, 2.0, 4.0), strict=True))
EQUAL = dict.fromkeys(HOSPITALS, 1.5)
SAME, SLOW = dict.fromkeys(HOSPITALS, 400.0), dict(zip(HOSPITALS, (800.0, 600.0, 400.0, 100.0), strict=True))
CASES = {"differ": (UNEQUAL, SAME), "alike": (EQUAL, SAME), "slow": (UNEQUAL, SLOW)}
BALANCERS = {case: ("fixed", *(("proportional",) if case == "slow" else ()), "spend-evenly") for case in CASES}
"""By speed only where speeds differ: else its batches are equal."""


def settings(files: list[Path], kind: str, budgets: Mapping[str, float], seed: int, rounds: int) -> StrategyConfig:
    privacy = f"{{kind: dp-sgd, clip: 1.0, noise_multiplier: {NOISE}}}"
    spent = f", budgets: {json.dumps(budgets)}, delta: {DELTA}" if kind == "spend-evenly" else ""
    config = strategy(files, privacy, seed, RATE)
    more = {"balancer": f"{{kind: {kind}{spent}}}", "cipher": "{kind: plain}", "stop": f"{{rounds: {rounds}}}"}
    said = [f"{key}={value}" for key, value in more.items()]
    return StrategyConfig.load("lb-bsp", [*said, *_sections(config), "min_silos=1", f"seed={seed}"])


def _sections(config: StrategyConfig) -> list[str]:
    whole = config.model_dump(mode="json", exclude_unset=True)
    return [f"{key}={json.dumps(whole[key])}" for key in ("task", "local", "privacy")]


def machines(budgets: Mapping[str, float], speeds: Mapping[str, float]) -> ClusterConfig:
    own = {name: {"epsilon": budgets[name], "delta": DELTA, "accountant": "rdp"} for name in HOSPITALS}
    entries = [{"name": name, "speed": speeds[name], "privacy": own[name]} for name in HOSPITALS]
    return ClusterConfig.model_validate({"silos": entries})


def measure(files: list[Path], kind: str, case: str, seed: int, folder: Path) -> dict[str, float]:
    """Run until all budgets are spent; then again to the last version, which a run without silos does not keep."""
    budgets, speeds = CASES[case]
    cluster = machines(budgets, speeds)
    with suppress(RunError):
        run_virtual(settings(files, kind, budgets, seed, MOST), cluster, folder / "spent")
    rounds, first, now_s = 0, None, 0.0
    for entry in replay(folder / "spent" / "journal.jsonl"):
        if first is None and any(isinstance(event, SiloLost) for event in entry.events):
            first = rounds
        if any(isinstance(action, Commit) for action in entry.actions):
            rounds, now_s = rounds + 1, entry.at_s
    config = settings(files, kind, budgets, seed, max(rounds, 1))
    run_virtual(config, cluster, folder / "last")
    found = accuracy(config, folder / "last" / "model.pt")[0]
    return {"first": rounds if first is None else first, "rounds": rounds, "round_s": now_s / rounds, "accuracy": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed of one case")
    parser.add_argument("--out", type=Path, default=Path("bench/results/balanced_budgets.json"))
    args = parser.parse_args()
    cells: list[dict[str, Any]] = []
    with TemporaryDirectory() as place:
        files = tables(Path(place))
        for case in list(CASES)[: 1 if args.quick else None]:
            for kind in BALANCERS[case]:
                found = []
                for seed in range(1 if args.quick else 3):
                    found.append(measure(files, kind, case, seed, Path(place) / f"{case}-{kind}-{seed}"))
                    print(case, kind, seed, found[-1], flush=True)
                figures = {name: mean(each[name] for each in found) for name in ("first", "rounds", "round_s")}
                cells.append(
                    {"case": case, "balancer": kind, **figures, "accuracy": interval([e["accuracy"] for e in found])}
                )
    columns = ["case", "balancer", "rounds to the first end", "rounds in all", "seconds a round", "accuracy"]
    print_table("four hospitals until their budgets are spent", columns, [_row(cell) for cell in cells])
    write_json(args.out, {"noise": NOISE, "delta": DELTA, "cells": cells})


def _row(cell: dict[str, Any]) -> list[str]:
    middle, half = cell["accuracy"]
    told = [f"{cell['first']:.0f}", f"{cell['rounds']:.0f}", f"{cell['round_s']:.2f}"]
    return [cell["case"], cell["balancer"], *told, f"{middle:.3f} ± {half:.3f}"]


if __name__ == "__main__":
    main()
