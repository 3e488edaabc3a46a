"""Test accuracy on four hospitals' tables at several epsilons, beside FLamby's published figures.

    python bench/privacy/private_heart.py [--quick] [--out FILE.json]

The rows are FLamby's (740 patients without gaps in ten columns, 486 to train and 254 for tests; Ogier du Terrail et al.
2022, arXiv:2210.04620). Each seed draws its own test rows, since FLamby's split is a file of theirs. In a private run
each row is drawn by itself, so the numbers vary by some rows.
The model is their logistic regression. Each hospital does 100 local updates in all. Columns are scaled by round numbers
from general knowledge, because a scale by the hospital's own mean would make each row depend on the others.

Strategy: ``lb-bsp`` with updates encrypted by ``bfv``; each hospital's epsilon is the whole run's. Scores are not sent.
This script, unlike any hospital, evaluates the final model on all test rows. The learning rate is the same for all rows
of the table; ``--rates`` tries others, on splits of other seeds.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import scipy.stats
import torch

from bench.common import print_table, write_json
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.simulation.run import run_virtual
from fedsync.tasks.task_protocol import SiloSlot

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
DATA = Path(__file__).parents[2] / "examples" / "heart" / "data"
USED = ("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak")
SCALES = {"age": [55, 10], "sex": [0.5, 0.5], "trestbps": [130, 20], "chol": [200, 100], "fbs": [0.2, 0.4]}
SCALES |= {"thalach": [140, 25], "exang": [0.5, 0.5], "oldpeak": [1, 1]}
PRIVACY: dict[str, str | None] = {
    "none": None,
    "1": "{kind: dp-sgd, clip: 1.0, target_epsilon: 1.0, delta: 1.0e-3}",
    "0.1": "{kind: dp-sgd, clip: 1.0, target_epsilon: 0.1, delta: 1.0e-4}",
}
PUBLISHED = {"none": 0.712, "1": 0.702, "0.1": 0.606}
"""FLamby's table on privacy: test accuracy without privacy, at epsilon 1 and at 0.1."""

ROUNDS, STEPS, BATCH, RATE = 10, 10, 32, 0.5


def tables(folder: Path) -> list[Path]:
    """Write each hospital's rows without gaps in the used columns."""
    paths = []
    for name in HOSPITALS:
        table = pd.read_csv(DATA / f"{name}.csv", na_values="?")[[*USED, "num"]].dropna()
        table = table.astype({"cp": int, "restecg": int})
        paths.append(folder / f"{name}.csv")
        table.to_csv(paths[-1], index=False)
    return paths


def strategy(
    files: list[Path], privacy: str | None, seed: int, rate: float, more: Sequence[str] = (), base: str = "lb-bsp"
) -> StrategyConfig:
    categories = "{cp: {categories: ['1', '2', '3', '4']}, restecg: {categories: ['0', '1', '2']}}"
    said = [
        f"seed={seed}",
        f"stop={{rounds: {ROUNDS}}}",
        f"local={{steps: {STEPS}, batch_size: {BATCH}, learning_rate: {rate}, threads: 1}}",
        "cipher={kind: bfv, metrics: plain}",
        f"task={{kind: csv, files: {[str(path) for path in files]}, target: num, positive_above: 0, test_share: 0.343, "
        f"standardise: {SCALES}, columns: {categories}}}",
    ]
    return StrategyConfig.load(base, [*said, *more, *([] if privacy is None else [f"privacy={privacy}"])])


def accuracy(config: StrategyConfig, model: Path) -> tuple[float, float, list[int]]:
    """Accuracy over all test rows, and the mean of the hospitals'; then the numbers of training and test rows."""
    right, rows, trained, shares = 0, 0, 0, []
    for index, name in enumerate(HOSPITALS):
        task = config.task.build() if config.privacy is None else config.task.build_by_row()
        data = task.data(SiloSlot(name, index, len(HOSPITALS), config.seed))
        network = task.model()
        network.load_state_dict(torch.load(model, weights_only=True))
        inputs, labels = data.test.tensors  # type: ignore[attr-defined]
        found = int((network(inputs).argmax(1) == labels).sum())
        right, rows, trained = right + found, rows + len(labels), trained + len(data.train)  # type: ignore[arg-type]
        shares.append(found / len(labels))
    return right / rows, mean(shares), [trained, rows]


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half of its 95 % interval."""
    if len(values) < 2:
        return mean(values), float("nan")
    half = scipy.stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5
    return mean(values), float(half)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed")
    parser.add_argument("--rates", action="store_true", help="choose the learning rate, by seeds 100 to 102")
    parser.add_argument("--out", type=Path, default=Path("bench/results/private_heart.json"))
    args = parser.parse_args()
    seeds = range(100, 103) if args.rates else range(1 if args.quick else 5)
    rates = (0.1, 0.5, 2.0) if args.rates else (RATE,)
    cells: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder:
        files = tables(Path(folder))
        silos = ClusterConfig.load(DATA.parent / "silos.yaml")
        for rate in rates:
            for name, privacy in PRIVACY.items():
                found = []
                for seed in seeds:
                    config = strategy(files, privacy, seed, rate)
                    out = Path(folder) / f"{rate}-{name}-{seed}"
                    run_virtual(config, silos, out)
                    found.append(accuracy(config, out / "model.pt"))
                    print(f"rate {rate:g} epsilon {name} seed {seed}: {found[-1][0]:.3f}", flush=True)
                pooled, mean_of = interval([each[0] for each in found]), interval([each[1] for each in found])
                cells.append({"rate": rate, "epsilon": name, "pooled": pooled, "mean": mean_of, "rows": found[0][2]})
    columns = ["epsilon", "learning rate", "rows", "accuracy", "mean of hospitals", "published"]
    print_table("UCI heart, test accuracy (95 % interval over seeds)", columns, [_row(cell) for cell in cells])
    write_json(args.out, {"rounds": ROUNDS, "steps": STEPS, "batch": BATCH, "seeds": len(seeds), "cells": cells})


def _row(cell: dict[str, Any]) -> list[str]:
    told = [f"{middle:.3f} ± {half:.3f}" for middle, half in (cell["pooled"], cell["mean"])]
    rows = "/".join(map(str, cell["rows"]))
    return [cell["epsilon"], f"{cell['rate']:g}", rows, *told, f"{PUBLISHED[cell['epsilon']]:.3f}"]


if __name__ == "__main__":
    main()
