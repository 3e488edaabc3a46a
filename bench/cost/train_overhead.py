"""Cost of `Trainer.run` over the bare PyTorch loop.

Same model, data, batches and optimizer; repetitions alternate within one process, and ratios are taken pair by
pair, so that a busier machine slows both. The bare loop counts its steps alone. "run" is the whole call, with setting
the weights, a fresh optimizer, reading the update and the resource probe. "steps" is the report's compute time, and
"beside" the rest of the call [ms]. "processor" is run/bare in processor seconds. With one thread and other programs
running, it is the better figure.

    python bench/cost/train_overhead.py [--pairs 100] [--threads 1] [--out bench/results/train_overhead.json]
"""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, process_time

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from bench.common import alternated
from fedsync.core.orders import Cursor, WorkOrder
from fedsync.tasks.digits import DigitsTask
from fedsync.tasks.partition import Iid
from fedsync.tasks.task_protocol import SiloSlot, Task
from fedsync.train.batches import Sampler
from fedsync.train.loop import Trainer
from fedsync.train.options import LocalOptions

SLOT = SiloSlot("silo-0", 0, 5, 7)


class LargerDigitsTask(DigitsTask):
    """The same data and a network with some 30 times the parameters."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 64, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, 256),
            nn.ReLU(),
            nn.Linear(256, 10),
        )


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; times and ratios are medians over the pairs."""

    model: str
    parameters: int
    batch_size: int
    steps: int
    bare_ms: float
    run_ms: float
    beside_ms: float
    steps_ratio: float
    run_ratio: float
    run_ratio_quartiles: tuple[float, float]
    processor_ratio: float


class Bare:
    """The loop that everyone writes, over batches drawn beforehand."""

    def __init__(self, task: Task, order: WorkOrder) -> None:
        train = task.data(SLOT).train
        assert isinstance(train, TensorDataset)
        self._inputs, self._labels = train.tensors
        self._model = task.model().train()
        self._initial = {name: tensor.clone() for name, tensor in self._model.state_dict().items()}
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=order.learning_rate)
        sampler, cursor = Sampler(len(train), SLOT.seed, SLOT.name), Cursor()
        self._batches = []
        for _ in range(order.max_steps):
            rows, cursor = sampler.take(cursor, order.batch_size)
            self._batches.append(torch.from_numpy(rows.copy()))

    def run(self) -> tuple[float, float]:
        """Seconds and processor seconds of one pass over the batches, from the same start each time."""
        self._model.load_state_dict(self._initial)
        start, processor_start = perf_counter(), process_time()
        for batch in self._batches:
            inputs, labels = self._inputs.index_select(0, batch), self._labels.index_select(0, batch)
            self._optimizer.zero_grad()
            nn.functional.cross_entropy(self._model(inputs), labels).backward()
            self._optimizer.step()
        return perf_counter() - start, process_time() - processor_start


def measure(name: str, task: Task, batch_size: int, steps: int, pairs: int) -> Row:
    """Alternate both loops ``pairs`` times, each going first every other time."""
    order = WorkOrder("u", 0, 1, batch_size, steps, 0.05, seed=1, evaluate=False)
    bare = Bare(task, order)
    trainer = Trainer(task, SLOT, LocalOptions())
    base = trainer.initial_model()

    def run() -> tuple[float, float, float]:
        start, processor_start = perf_counter(), process_time()
        outcome = trainer.run(order, base, Cursor())
        return perf_counter() - start, process_time() - processor_start, outcome.report.compute_s

    for _ in range(3):
        bare.run()
        run()
    bares, runs = alternated(bare.run, run, pairs)
    bare_s, bare_processor_s = np.array(bares).T
    run_s, run_processor_s, steps_s = np.array(runs).T
    low, high = np.percentile(run_s / bare_s, [25, 75])
    return Row(
        model=name,
        parameters=trainer.layout.size,
        batch_size=batch_size,
        steps=steps,
        bare_ms=1e3 * float(np.median(bare_s)),
        run_ms=1e3 * float(np.median(run_s)),
        beside_ms=1e3 * float(np.median(run_s - steps_s)),
        steps_ratio=float(np.median(steps_s / bare_s)),
        run_ratio=float(np.median(run_s / bare_s)),
        run_ratio_quartiles=(float(low), float(high)),
        processor_ratio=float(np.median(run_processor_s / bare_processor_s)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=100, help="repetitions of both loops")
    parser.add_argument("--out", type=Path, default=Path("bench/results/train_overhead.json"))
    parser.add_argument("--threads", type=int, default=1, help="of torch; with all cores, other programs disturb more")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = [
        measure(name, task, batch_size, steps, options.pairs)
        for name, task in (("digits CNN", DigitsTask(Iid())), ("larger CNN", LargerDigitsTask(Iid())))
        for batch_size, steps in ((32, 20), (32, 100), (128, 20))
    ]
    print(f"{'model':<11}{'parameters':>11}{'batch':>6}{'steps':>6}{'bare ms':>9}{'run ms':>9}{'beside':>8}", end="")
    print(f"{'steps/bare':>12}{'run/bare':>10}{'quartiles':>16}{'processor':>11}")
    for row in rows:
        low, high = row.run_ratio_quartiles
        print(f"{row.model:<11}{row.parameters:>11,}{row.batch_size:>6}{row.steps:>6}", end="")
        print(
            f"{row.bare_ms:>9.2f}{row.run_ms:>9.2f}{row.beside_ms:>8.2f}{row.steps_ratio:>12.3f}{row.run_ratio:>10.3f}",
            end="",
        )
        print(f"{f'{low:.3f}-{high:.3f}':>16}{row.processor_ratio:>11.3f}")
    setting = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "pairs": options.pairs,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"setting": setting, "rows": [asdict(row) for row in rows]}, indent=2) + "\n")


if __name__ == "__main__":
    main()
