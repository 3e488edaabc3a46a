"""Time of a private local step, relative to Opacus on the same model and batch.

    python bench/cost/private_step.py [--quick] [--pairs N] [--out FILE.json]

Opacus: `GradSampleModule` and `DPOptimizer` as `PrivacyEngine` makes them, with a Poisson-sampled batch of the same
expected size from tensors in memory. FedSync: an order of `PrivateTrainer`. Both do the same number of steps, in turn,
on one thread. The figure is the ratio of the medians, FedSync over Opacus.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import nn

from bench.common import alternated, print_table, write_json
from fedsync.config.strategy import StrategyConfig
from fedsync.core.orders import Cursor, WorkOrder
from fedsync.privacy.release import PrivateSettings
from fedsync.tasks.task_protocol import SiloSlot, Task
from fedsync.train.dp_sgd.private_trainer import PrivateTrainer
from fedsync.train.options import LocalOptions

BATCHES, STEPS, RATE, CLIP, NOISE = (16, 64, 256), 40, 0.05, 1.0, 1.0
TASKS = {"digits": "{kind: digits}", "mlp": "{kind: mlp, hidden: [256, 256], data: {kind: digits28}}"}


class OpacusLoop:
    """Opacus' loop over a task's training tensors."""

    def __init__(self, task: Task, slot: SiloSlot, batch: int) -> None:
        torch.manual_seed(0)
        self._task, self._tensors = task, task.data(slot).train.tensors  # type: ignore[attr-defined]
        self._rows = len(self._tensors[0])
        self._rate = batch / self._rows
        self._model: nn.Module = GradSampleModule(task.model().train())
        plain = torch.optim.SGD(self._model.parameters(), lr=RATE)
        self._optimizer = DPOptimizer(plain, noise_multiplier=NOISE, max_grad_norm=CLIP, expected_batch_size=batch)

    def run(self) -> float:
        start_s = perf_counter()
        for _ in range(STEPS):
            rows = torch.from_numpy(np.flatnonzero(np.random.default_rng().random(self._rows) < self._rate))
            self._optimizer.zero_grad(set_to_none=True)
            self._task.loss(self._model, [tensor[rows] for tensor in self._tensors]).backward()
            self._optimizer.step()
        return (perf_counter() - start_s) / STEPS


class FedSyncLoop:
    """Orders of a private trainer."""

    def __init__(self, task: Task, slot: SiloSlot, batch: int) -> None:
        self._trainer = PrivateTrainer(task, slot, LocalOptions(threads=1, resources=False))
        self._trainer.make_private(PrivateSettings(CLIP, NOISE, self._trainer.examples))
        self._base = self._trainer.initial_model()
        self._order = WorkOrder("a/1", 0, 1, batch, STEPS, RATE, seed=1, evaluate=False)

    def run(self) -> float:
        return self._trainer.run(self._order, self._base, Cursor()).report.compute_s / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one task, one batch size, three pairs")
    parser.add_argument("--pairs", type=int, default=15, help="runs of each side in a cell")
    parser.add_argument("--out", type=Path, default=Path("bench/results/private_step.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    cells: list[dict[str, Any]] = []
    for name in list(TASKS)[: 1 if args.quick else None]:
        task = StrategyConfig.load("fedavg", [f"task={TASKS[name]}"]).task.build()
        for batch in BATCHES[:1] if args.quick else BATCHES:
            slot = SiloSlot("a", 0, 2, 0)
            ours, theirs = FedSyncLoop(task, slot, batch), OpacusLoop(task, slot, batch)
            ours.run(), theirs.run()
            found = alternated(ours.run, theirs.run, 3 if args.quick else args.pairs)
            own_s, other_s = median(found[0]), median(found[1])
            cells.append({"task": name, "batch": batch, "fedsync_s": own_s, "opacus_s": other_s})
    rows = [_row(cell) for cell in cells]
    columns = ["task", "batch", "FedSync (ms)", "Opacus (ms)", "ratio"]
    print_table("a private local step, median", columns, rows)
    write_json(args.out, {"steps": STEPS, "cells": cells})


def _row(cell: dict[str, Any]) -> list[str]:
    own, other = cell["fedsync_s"], cell["opacus_s"]
    return [cell["task"], str(cell["batch"]), f"{own * 1e3:.2f}", f"{other * 1e3:.2f}", f"{own / other:.2f}"]


if __name__ == "__main__":
    main()
