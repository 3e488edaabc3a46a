"""Correlation of a masked sum with one silo's update, against the bound of work.

    python bench/privacy/masked_sums.py [--quick] [--out FILE.json]

A server with one silo on its side reads the sum of the other silos' updates. It gives its victim more local steps
than the others, up to a ``cipher.work_ratio`` of ``ratio``, and compares the sum with the victim's update. If updates
count by samples, the bound applies to steps times samples, so the victim's steps grow by its root. The figure is the
correlation of the two, between 0 and 1; 1 is the victim's update itself. Silos train from the task's first model, in
the clear, because masks cancel without loss.

Every silo is the victim once, for each of several seeds. Weights are those of ``weight: silo`` and ``weight: samples``.
On digits a silo has two classes, so updates differ much. Heart has four hospitals' tables; if there are more silos,
several silos draw different rows of one table. Silos that learn alike correlate at any ratio.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.common import markdown_table, print_table, write_json
from fedsync.config.run_spec import RunSpec
from fedsync.config.strategy import StrategyConfig
from fedsync.config.tasks.task_kinds import CsvConfig
from fedsync.config.tasks.task_trainers import trainer_of
from fedsync.core.orders import Cursor, WorkOrder
from fedsync.model.layout import Vector
from fedsync.silo.protocol import Identity
from fedsync.silo.session.silo_setup import place_of

RATIOS, SILOS, SEEDS = (1, 2, 4, 8, 64), (3, 5, 10), 2
STEPS, BATCH = 4, 8
HEART = Path(__file__).parents[2] / "examples" / "heart"
TASKS = ("digits", "heart")


def updates(task: str, silos: int, seed: int, steps: list[int]) -> dict[int, list[Vector]]:
    """Each silo's update after so many steps, from the first model, by the number of steps."""
    said = ["task={kind: digits, partition: {kind: pathological, classes_per_silo: 2}}", "local.learning_rate=0.05"]
    config = StrategyConfig.load("fedavg", [*said, f"seed={seed}", "local.threads=1"])
    if task == "heart":
        config = StrategyConfig.load(HEART / "strategy.yaml", [f"seed={seed}", "local.threads=1"])
        assert isinstance(config.task, CsvConfig)
        files = config.task.files or []
        # More silos than hospitals: each table is several silos', which draw other rows.
        repeated = [files[index % len(files)] for index in range(silos)]
        config = config.model_copy(update={"task": replace(config.task, files=repeated, standardise="own")})
    spec = RunSpec.of(config, None, silos)
    found: dict[int, list[Vector]] = {count: [] for count in steps}
    for index in range(silos):
        site, slots, local = place_of(spec, Identity(spec.dump(), index, f"silo-{index}"))
        trainer = trainer_of(spec.task, site, slots, local, spec.model.build())
        base = trainer.initial_model()
        for count in steps:
            rate = spec.local.learning_rate
            order = WorkOrder(f"silo-{index}/1", 0, 1, BATCH, count, rate, seed=seed, evaluate=False)
            found[count].append(trainer.run(order, base, Cursor()).update.astype(np.float64))
    return found


def correlation(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    length = float(np.linalg.norm(one) * np.linalg.norm(other))
    return abs(float(np.dot(one, other))) / length if length else 0.0


def figures(task: str, silos: int, seed: int, ratios: list[int]) -> dict[int, tuple[list[float], list[float]]]:
    """By ratio, for each victim: correlation of the sum with its update where silos count alike, and by samples."""
    more = {ratio: (STEPS * ratio, int(STEPS * ratio**0.5)) for ratio in ratios}
    done = updates(task, silos, seed, sorted({STEPS, *(count for counts in more.values() for count in counts)}))
    found: dict[int, tuple[list[float], list[float]]] = {ratio: ([], []) for ratio in ratios}
    for ratio in ratios:
        for victim in range(silos):
            friend = (victim + 1) % silos
            others = np.sum([done[STEPS][each] for each in range(silos) if each not in (victim, friend)], axis=0)
            for by_samples, (count, kept) in enumerate(zip(more[ratio], found[ratio], strict=True)):
                own, weight = done[count][victim], count / STEPS if by_samples else 1.0
                kept.append(correlation(weight * own + others, own))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two ratios, three silos, one seed")
    parser.add_argument("--out", type=Path, default=Path("bench/results/masked_sums.json"))
    args = parser.parse_args()
    ratios, sizes, seeds = ((1, 4), (3,), 1) if args.quick else (RATIOS, SILOS, SEEDS)
    cells: list[dict[str, Any]] = []
    for task in TASKS:
        for silos in sizes:
            runs = [figures(task, silos, seed, list(ratios)) for seed in range(seeds)]
            for ratio in ratios:
                silo, samples = ([each for run in runs for each in run[ratio][at]] for at in (0, 1))
                cells.append(
                    {"task": task, "silos": silos, "ratio": ratio, "silo": mean(silo), "samples": mean(samples)}
                    | {"silo_max": max(silo), "samples_max": max(samples)}
                )
    columns = ["task", "silos", "counted by", *(f"{ratio} x" for ratio in ratios)]
    rows = [
        [task, silos, weight, *(f"{_cell(cells, task, silos, ratio, weight)}" for ratio in ratios)]
        for task in TASKS
        for silos in sizes
        for weight in ("silo", "samples")
    ]
    print_table(
        "correlation of a masked sum with the victim's update, by the ratio of work: mean (largest)", columns, rows
    )
    print(markdown_table(columns, rows))
    write_json(args.out, {"steps": STEPS, "batch_size": BATCH, "seeds": seeds, "cells": cells})


def _cell(cells: list[dict[str, Any]], task: str, silos: int, ratio: int, weight: str) -> str:
    found = next(each for each in cells if (each["task"], each["silos"], each["ratio"]) == (task, silos, ratio))
    return f"{found[weight]:.2f} ({found[weight + '_max']:.2f})"


if __name__ == "__main__":
    main()
