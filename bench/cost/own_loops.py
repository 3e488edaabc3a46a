"""Time of a step in a user's own loop, relative to the bare PyTorch loop and to the shipped loop.

Model, data set, batches and optimizer are the same, in one process. All ways take turns, each turn in the opposite
order, so that a busier machine slows all of them. Samples are read one by one and collated, as by a `DataLoader`
without workers:

- "bare": a usual PyTorch loop over a `DataLoader`
- "shipped": the task's loop
- "work.loader", "work.batches": a `SiloApp`, whose loop is the bare one
- "hosted": a Flower ClientApp, whose loop is the bare one over ``steps(msg, loader)``

"step ms" is the report's compute time per step; "over bare" is the median of its ratios within a turn, with quartiles.
"processor" is the whole order, from setting the weights to reading the update, in processor seconds, relative to the
bare steps and to the shipped order. With one thread and other programs running, it is the better figure.

    python bench/cost/own_loops.py [--turns 30] [--steps 20 100] [--out bench/results/own_loops.json]
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from bench.common import print_table, write_json
from bench.cost.train_overhead import SLOT, LargerDigitsTask
from fedsync.client import Silo, SiloApp, Work, steps
from fedsync.core.orders import Cursor, WorkOrder
from fedsync.tasks.partition import Iid
from fedsync.tasks.task_protocol import SiloData, SiloSlot, Task
from fedsync.train.guests.guest import GuestTrainer
from fedsync.train.guests.guest_clientapp import ClientAppTrainer, FirstModel
from fedsync.train.local_trainer import LocalTrainer
from fedsync.train.loop import Trainer
from fedsync.train.options import LocalOptions

BATCH, RATE = 32, 0.05
SITE = Silo(0, "silo-0", 7, "cpu")
OPTIONS = LocalOptions(device="cpu")


class Samples(Dataset[Any]):
    """A data set that is indexed one by one, unlike a `TensorDataset`, which the shipped loop cuts in one go."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self._tensors = tensors

    def __len__(self) -> int:
        return len(self._tensors[0])

    def __getitem__(self, row: int) -> tuple[Tensor, ...]:
        return tuple(tensor[row] for tensor in self._tensors)


class SampledTask(LargerDigitsTask):
    def data(self, slot: SiloSlot) -> SiloData:
        data: Any = super().data(slot)
        return SiloData(Samples(data.train.tensors), data.test)


def train(model: nn.Module, batches: Any) -> None:
    """The loop that everyone writes."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for inputs, labels in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def loader(data: Dataset[Any]) -> DataLoader[Any]:
    return DataLoader(data, BATCH, shuffle=True, drop_last=True)


def endless(data: Dataset[Any]) -> Iterator[Any]:
    while True:
        yield from loader(data)


def silo_app(task: Task, data: Dataset[Any], batches: Callable[[Work], Any]) -> LocalTrainer:
    app = SiloApp()

    @app.setup()
    def setup(silo: Silo) -> Any:
        return silo.use(task.model, data)

    @app.train()
    def fit(work: Work, model: nn.Module) -> None:
        train(model, batches(work))

    return GuestTrainer(app, SITE, OPTIONS)


def client_app(task: Task, data: Dataset[Any]) -> LocalTrainer:
    app = ClientApp()

    @app.train()
    def fit(msg: Message, context: Context) -> Message:
        model = task.model()
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        train(model, steps(msg, loader(data)))
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=msg)

    return ClientAppTrainer(app, FirstModel(make=task.model), SITE, 5, OPTIONS, Path("/nowhere"))


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; ratios are medians over the turns, with quartiles of the first."""

    loop: str
    steps: int
    step_ms: float
    over_bare: float
    quartiles: tuple[float, float]
    processor_over_bare: float
    processor_over_shipped: float


def measure(count: int, turns: int) -> list[Row]:
    task = SampledTask(Iid())
    data = task.data(SLOT).train
    trainers = {
        "shipped": Trainer(task, SLOT, OPTIONS),
        "work.loader": silo_app(task, data, lambda work: work.loader(data)),
        "work.batches": silo_app(task, data, lambda work: work.batches(endless(data))),
        "hosted": client_app(task, data),
    }
    model, order = task.model(), WorkOrder("u", 0, 1, BATCH, count, RATE, seed=1, evaluate=False)
    base = trainers["shipped"].initial_model()

    def bare() -> tuple[float, float]:
        start_s, processor_s = perf_counter(), process_time()
        train(model, islice(endless(data), count))
        return perf_counter() - start_s, process_time() - processor_s

    def ordered(trainer: LocalTrainer) -> tuple[float, float]:
        processor_s = process_time()
        report = trainer.run(order, base, Cursor()).report
        return report.compute_s, process_time() - processor_s

    ways: dict[str, Callable[[], tuple[float, float]]] = {"bare": bare}
    ways |= {name: partial(ordered, trainer) for name, trainer in trainers.items()}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for turn in range(-2, turns):
        for name in list(ways) if turn % 2 else list(reversed(ways)):
            seconds = ways[name]()
            if turn >= 0:  # the first ones warm up
                taken[name].append(seconds)
    steps_s, processor_s = ({name: np.array(each)[:, part] for name, each in taken.items()} for part in (0, 1))
    return [
        Row(
            loop=name,
            steps=count,
            step_ms=1e3 * float(np.median(steps_s[name])) / count,
            over_bare=float(np.median(steps_s[name] / steps_s["bare"])),
            quartiles=tuple(np.percentile(steps_s[name] / steps_s["bare"], [25, 75]).tolist()),
            processor_over_bare=float(np.median(processor_s[name] / processor_s["bare"])),
            processor_over_shipped=float(np.median(processor_s[name] / processor_s["shipped"])),
        )
        for name in ways
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--steps", type=int, nargs="+", default=[20, 100])
    parser.add_argument("--out", type=Path, default=Path("bench/results/own_loops.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    begun_load = os.getloadavg()[0]
    rows = [row for count in options.steps for row in measure(count, options.turns)]
    load = (begun_load, os.getloadavg()[0])
    cells = [
        (row.loop, row.steps, *(f"{each:.3f}" for each in (row.step_ms, row.over_bare, *row.quartiles)),
         f"{row.processor_over_bare:.3f}", f"{row.processor_over_shipped:.3f}")
        for row in rows
    ]  # fmt: skip
    columns = ("loop", "steps", "step ms", "over bare", "25 %", "75 %", "processor", "over shipped")
    print_table(
        f"{options.turns} turns, batches of {BATCH}, one thread, load {load[0]:.1f} to {load[1]:.1f}", columns, cells
    )
    write_json(options.out, {"torch": torch.__version__, "load": load, "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
