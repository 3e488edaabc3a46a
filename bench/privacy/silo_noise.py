"""Test accuracy with noise on whole updates (``privacy.kind: silo-noise``), by epsilon and number of silos.

    python bench/privacy/silo_noise.py [--silos 4 16 32] [--seeds 5] [--clip 1.0] [--quick] [--out FILE.json]

Rows, columns and test as in ``private_heart.py``. Four silos are the four hospitals. For more silos, the rows of all
hospitals are dealt out at random, so each silo has fewer rows, and all silos have alike rows. That is easier than the
same number of hospitals.

Strategy: ``fedavg`` with equal weights, updates encrypted by ``bfv``. All silos are in each sum, and one of them may
collude: its share of the noise does not count. Epsilon is that of the whole run for a whole silo. No setting was chosen
by its accuracy.

``guess`` is the accuracy of the most frequent answer; a model below it is worth nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
import torch

from bench.common import print_table, write_json
from bench.privacy.private_heart import HOSPITALS, interval, strategy, tables
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.simulation.run import run_virtual
from fedsync.tasks.task_protocol import SiloSlot

SILOS = (4, 16, 32)
EPSILONS = (None, 32.0, 8.0, 2.0, 0.5)
DELTA, RATE, STEPS, BATCH, ROUNDS = 1e-2, 0.5, 10, 8, 10


def dealt(files: Sequence[Path], silos: int, seed: int, folder: Path) -> list[Path]:
    """Return the tables of ``silos`` silos: the hospitals' own, or all their rows dealt out at random."""
    if silos == len(files):
        return list(files)
    rows = pd.concat([pd.read_csv(file) for file in files]).sample(frac=1.0, random_state=seed)
    paths = [folder / f"rows-{silos}-{seed}-{number}.csv" for number in range(silos)]
    for number, path in enumerate(paths):
        rows.iloc[number::silos].to_csv(path, index=False)
    return paths


def said(files: list[Path], epsilon: float | None, clip: float, seed: int) -> StrategyConfig:
    more = [
        f"stop={{rounds: {ROUNDS}}}",
        f"local={{steps: {STEPS}, batch_size: {BATCH}, learning_rate: {RATE}, threads: 1}}",
        "aggregation={kind: fedavg, weight: silo}",
    ]
    if epsilon is None:
        return strategy(files, None, seed, RATE, [*more, "cipher={kind: plain}"], "fedavg")
    more += [f"cipher={{kind: bfv, metrics: plain, kept_versions: 0, members: {len(files)}}}"]
    privacy = f"{{kind: silo-noise, clip: {clip}, target_epsilon: {epsilon}, delta: {DELTA}}}"
    return strategy(files, privacy, seed, RATE, more, "fedavg")


def scored(config: StrategyConfig, silos: int, model: Path) -> tuple[float, float]:
    """Accuracy of a model over the test rows of all silos, and that of the most frequent answer."""
    right = rows = ill = 0
    for index in range(silos):
        task = config.task.build()
        data = task.data(SiloSlot(f"silo-{index}", index, silos, config.seed))
        network = task.model()
        network.load_state_dict(torch.load(model, weights_only=True))
        inputs, labels = data.test.tensors  # type: ignore[attr-defined]
        right += int((network(inputs).argmax(1) == labels).sum())
        rows, ill = rows + len(labels), ill + int(labels.sum())
    return right / rows, max(ill, rows - ill) / rows


def trained(files: list[Path], epsilon: float | None, clip: float, seed: int, folder: Path) -> tuple[float, float]:
    entries = [{"name": f"silo-{index}", "speed": 400.0} for index in range(len(files))]
    config, out = said(files, epsilon, clip, seed), folder / f"{len(files)}-{epsilon}-{clip}-{seed}"
    summary = run_virtual(config, ClusterConfig.model_validate({"silos": entries}), out)
    assert summary["rounds"] == ROUNDS and not summary["lost"], summary["lost"]
    return scored(config, len(files), out / "model.pt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--silos", type=int, nargs="+", default=SILOS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--quick", action="store_true", help="one seed, and the first two numbers of silos")
    parser.add_argument("--out", type=Path, default=Path("bench/results/silo_noise.json"))
    args = parser.parse_args()
    seeds, cells = range(1 if args.quick else args.seeds), list[dict[str, Any]]()
    with TemporaryDirectory() as name:
        folder = Path(name)
        hospitals = tables(folder)
        for silos in args.silos[:2] if args.quick else args.silos:
            for epsilon in EPSILONS:
                found = [
                    trained(dealt(hospitals, silos, seed, folder), epsilon, args.clip, seed, folder) for seed in seeds
                ]
                accuracy, guess = interval([each[0] for each in found]), mean(each[1] for each in found)
                cells.append({"silos": silos, "epsilon": epsilon, "accuracy": accuracy, "guess": guess})
                print(cells[-1], flush=True)
    title = f"UCI heart with noise on whole updates, {len(seeds)} seeds (95 % interval)"
    print_table(title, ["silos", "epsilon", "accuracy", "guess"], [_row(each) for each in cells])
    settings = {"rounds": ROUNDS, "steps": STEPS, "batch": BATCH, "rate": RATE, "clip": args.clip, "delta": DELTA}
    write_json(args.out, {**settings, "seeds": len(seeds), "hospitals": HOSPITALS, "cells": cells})


def _row(each: dict[str, Any]) -> list[str]:
    middle, half = each["accuracy"]
    epsilon = "none" if each["epsilon"] is None else f"{each['epsilon']:g}"
    return [str(each["silos"]), epsilon, f"{middle:.3f} ± {half:.3f}", f"{each['guess']:.3f}"]


if __name__ == "__main__":
    main()
