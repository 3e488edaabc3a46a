"""Cost of all default metrics in an evaluation: a logistic regression, an MLP and a CNN.

Trainers with and without metrics evaluate the same samples in turns, in one process on one thread. Figures are medians
of processor seconds, which other programs hardly change.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from time import process_time

import torch
from torch import nn
from torch.utils.data import TensorDataset

from bench.common import print_table, write_json
from fedsync.core.orders import Split
from fedsync.evaluation.metrics.metric_types import AnyMetric
from fedsync.evaluation.metrics.named import NOTHING, Wanted, classification
from fedsync.extras.tasks.networks import small_cnn
from fedsync.tasks.task_protocol import SiloData, SiloSlot, Task
from fedsync.train.loop import Trainer
from fedsync.train.options import LocalOptions

SHAPES = {"logistic": (13,), "MLP": (64,), "CNN": (1, 8, 8)}


class Evaluated(Task):
    """Samples without a meaning, for a network that is never trained."""

    def __init__(self, network: str, classes: int, samples: int) -> None:
        self.network, self.classes, self.samples = network, classes, samples

    def model(self) -> nn.Module:
        shape, classes = SHAPES[self.network], self.classes
        if self.network == "logistic":
            return nn.Linear(shape[0], classes)
        if self.network == "CNN":
            return small_cnn("group", shape, classes)
        return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, classes))

    def data(self, slot: SiloSlot) -> SiloData:
        torch.manual_seed(slot.seed)
        inputs = torch.randn(self.samples, *SHAPES[self.network])
        data = TensorDataset(inputs, torch.randint(0, self.classes, (self.samples,)))
        return SiloData(data, data)

    def metrics(self) -> tuple[AnyMetric, ...]:
        return classification(self.classes)


def trainer(task: Task, wanted: Wanted) -> Trainer:
    options = LocalOptions(device="cpu", threads=1, resources=False, measured=wanted)
    return Trainer(task, SiloSlot("silo", 0, 1, 7), options)


def timed(task: Task, turns: int) -> tuple[float, float]:
    """Median seconds of an evaluation without metrics, and with."""
    both = [trainer(task, NOTHING), trainer(task, Wanted.of(task.metrics()))]
    seconds: list[list[float]] = [[], []]
    for turn in range(turns + 1):
        for each, found in zip(both, seconds, strict=True):
            begin_s = process_time()
            each._evaluate(Split.VALIDATION)
            if turn:  # the first one warms up
                found.append(process_time() - begin_s)
    without, measured = map(median, seconds)
    return without, measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("bench/results/metrics.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, figures = [], []
    for network in SHAPES:
        for classes in (2, 10):
            without, measured = timed(Evaluated(network, classes, options.samples), options.turns)
            ratio = measured / without
            rows.append([network, classes, f"{1e3 * without:.2f}", f"{1e3 * measured:.2f}", f"{ratio:.2f}"])
            figures.append(
                {"network": network, "classes": classes, "without_s": without, "with_s": measured, "ratio": ratio}
            )
    title = f"An evaluation of {options.samples} samples"
    print_table(title, ["network", "classes", "without metrics ms", "with ms", "ratio"], rows)
    write_json(options.out, {"samples": options.samples, "turns": options.turns, "evaluations": figures})


if __name__ == "__main__":
    main()
