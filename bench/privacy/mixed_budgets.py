"""Test accuracy where hospitals have different budgets: updates weighed by examples, by precision, and equally.

    python bench/privacy/mixed_budgets.py [--seeds 10] [--quick] [--out FILE.json]

Setting, rows and test as in ``private_heart.py``. One or two of the four hospitals have a small budget; the others have
a large one. Accuracy is paired by seed: the last column is the mean difference to ``examples``, with 95 % interval.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.common import print_table, write_json
from bench.privacy.private_heart import HOSPITALS, accuracy, interval, strategy, tables
from fedsync.config.cluster import ClusterConfig
from fedsync.simulation.run import run_virtual

SPEEDS = (800.0, 600.0, 200.0, 400.0)
BUDGETS = {
    "3 at all": (3.0, 3.0, 3.0, 3.0),
    "0.3 at two, 3 at two": (0.3, 3.0, 0.3, 3.0),
    "0.1 at the largest, 3 at others": (0.1, 3.0, 3.0, 3.0),
    "0.1 at three, 3 at one": (0.1, 3.0, 0.1, 0.1),
}
WEIGHTS = ("examples", "precision", "silo")


def machines(budgets: tuple[float, ...]) -> ClusterConfig:
    return ClusterConfig.model_validate(
        {
            "silos": [
                {"name": name, "speed": speed, "privacy": {"epsilon": epsilon, "delta": 1e-3, "least_noise": 0.1}}
                for name, speed, epsilon in zip(HOSPITALS, SPEEDS, budgets, strict=True)
            ]
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="one seed")
    parser.add_argument("--out", type=Path, default=Path("bench/results/mixed_budgets.json"))
    args = parser.parse_args()
    seeds, cells = range(1 if args.quick else args.seeds), []
    privacy = "{kind: dp-sgd, clip: 1.0, target_epsilon: 3.0, delta: 1.0e-3}"
    with TemporaryDirectory() as folder:
        files = tables(Path(folder))
        for told, budgets in BUDGETS.items():
            found: dict[str, list[float]] = {weight: [] for weight in WEIGHTS}
            for seed in seeds:
                for weight in WEIGHTS:
                    more = [f"aggregation={{kind: fednova, weight: {weight}}}", "cipher={kind: plain}"]
                    config, out = strategy(files, privacy, seed, 0.5, more), Path(folder) / f"{told}-{weight}-{seed}"
                    summary = run_virtual(config, machines(budgets), out)
                    assert not summary["lost"], summary["lost"]
                    found[weight].append(accuracy(config, out / "model.pt")[0])
                print(f"epsilon {told}, seed {seed}: {[round(each[-1], 3) for each in found.values()]}", flush=True)
            for weight, values in found.items():
                differences = [value - usual for value, usual in zip(values, found["examples"], strict=True)]
                cells.append({"budgets": told, "weight": weight, "of": interval(values), "by": interval(differences)})
    columns = ["epsilon", "weight", "accuracy", "beside examples"]
    print_table(f"UCI heart, mixed budgets, {len(seeds)} seeds", columns, [_row(cell) for cell in cells])
    write_json(args.out, {"seeds": len(seeds), "cells": cells})


def _row(cell: dict[str, Any]) -> list[str]:
    (middle, half), (more, within) = cell["of"], cell["by"]
    return [cell["budgets"], cell["weight"], f"{middle:.3f} ± {half:.3f}", f"{more:+.3f} ± {within:.3f}"]


if __name__ == "__main__":
    main()
