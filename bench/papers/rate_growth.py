"""Rounds to the target with `cautious-adam`: its default rate, with and without growth, beside a grid of fixed rates.

    python bench/papers/rate_growth.py [--models text digits "dense, 4 layers"] [--seeds 2] [--out FILE]

FedAvg with one local step on equal silos: the map's tasks digits, digits28, heart and text, and the networks of
`digit_models_task.py` to an accuracy of 0.88, which were not used to choose the rule of growth. Four of them are wide:
the rule for wide layers was chosen with them. A run that misses its target counts with all its rounds.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from statistics import fmean

from bench.papers import digit_models_task
from bench.papers.map_cells import TASKS, Cell, Learning, Side, pooled, sets
from bench.papers.target_runs import Job, carry_out
from bench.papers.target_search import Point
from fedsync.policies.optimize.optimizer_policies import CautiousAdam

FIXED = (0.1, 0.2, 0.3, 0.45, 0.7, 1.0, 1.5, 2.0)
RATE, GROWTH = CautiousAdam().rate, CautiousAdam().growth
ROUNDS = 150
OWN = ("digits", "digits28", "heart", "text")
CELL = Cell("1", 0.1)
HELD = "held"


def rounds_to(name: str, rate: float, growth: float, seed: int) -> int | None:
    """Rounds to the target; None if it is missed."""
    task = name if name in OWN else HELD
    os.environ[digit_models_task.MODEL] = name
    learning = TASKS[task]
    silos = json.dumps(CELL.cluster(learning.silos).entries())
    if learning.metric == "accuracy":
        aim = f"target_accuracy: {learning.target}"
    else:
        loss = learning.target
        if learning.metric == "pooled":
            loss = (1 + loss) * carry_out(Job("pooled", "fedavg", pooled(task, seed), silos))["loss"]
        aim = f"target: {{metric: loss, at_most: {loss!r}}}"
    optimizer = f"server_optimizer={{kind: cautious-adam, rate: {rate}, growth: {growth}}}"
    changes = (*sets(task, Side("fedavg"), CELL, Point(1, 0.1), seed), optimizer, f"stop={{rounds: {ROUNDS}, {aim}}}")
    result = carry_out(Job("seconds", "fedavg", changes, silos))
    if "failed" in result:
        raise SystemExit(f"{name}: {result['failed']}")
    found: int | None = result["round"]
    return found


def mean_rounds(name: str, rate: float, growth: float, seeds: int) -> float:
    found = [rounds_to(name, rate, growth, 1000 + seed) for seed in range(seeds)]
    return fmean(ROUNDS if each is None else each for each in found)


def row(name: str, seeds: int) -> dict[str, float]:
    fixed = {rate: mean_rounds(name, rate, 1.0, seeds) for rate in FIXED}
    best = min(fixed, key=lambda rate: (fixed[rate], rate))
    growing = mean_rounds(name, RATE, GROWTH, seeds)
    return {"fixed": fixed[RATE], "growing": growing, "best rate": best, "at the best rate": fixed[best]}


def main() -> None:
    names = (*OWN, *digit_models_task.MODELS)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("bench/results/rate_growth.json"))
    options = parser.parse_args()
    file = Path(digit_models_task.__file__)
    TASKS[HELD] = Learning(4, f"{{kind: custom, file: {file}}}", 0.88, rounds=ROUNDS)
    print(f"| model | fixed {RATE} | {RATE}, growing | growing / fixed | best fixed rate | its rounds |", flush=True)
    print("|---|---:|---:|---:|---:|---:|", flush=True)
    found = {}
    for name in options.models:
        one = found[name] = row(name, options.seeds)
        ratio = one["growing"] / one["fixed"]
        rounds = f"{one['fixed']:.1f} | {one['growing']:.1f} | {ratio:.2f} | {one['best rate']:g}"
        print(f"| {name} | {rounds} | {one['at the best rate']:.1f} |", flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"seeds": options.seeds, "rounds": found}, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
