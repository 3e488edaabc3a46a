"""Cost of fetching samples in FedSync's loops over the user's own `DataLoader`, relative to a bare PyTorch loop.

An epoch is cut into orders of some steps. The data are JPEGs that Pillow decodes and augments (crop, flip, brightness),
and a store that takes 10 ms a sample. "bare" is one pass over a `DataLoader` with as many workers, which stay from
epoch to epoch. "shipped" is `Trainer` with `local.workers`. "work.loader" is a `SiloApp`'s loop, as it is and with
``persistent_workers=False``. They take turns in one process. "over bare" is the least time over the least time of the
bare loop, because other programs disturb the least times least. Quartiles of the ratios within a turn follow.

    python bench/cost/loader.py [--images 2000] [--turns 7] [--workers 2] [--out bench/results/loader.json]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from bench.common import print_table, write_json
from fedsync.client import Silo, SiloApp, Work
from fedsync.core.orders import Cursor, WorkOrder
from fedsync.tasks.task_protocol import SiloData, SiloSlot, Task
from fedsync.train.guests.guest import GuestTrainer
from fedsync.train.local_trainer import LocalTrainer
from fedsync.train.loop import Trainer
from fedsync.train.options import LocalOptions

SIDE, CROP = 224, 192
BATCH, STEPS = 32, 20
LATENCY_S = 0.01
SLOT = SiloSlot("silo-0", 0, 1, 7)

Sample = tuple[Tensor, int]


class Jpegs(Dataset[Sample]):
    """Files in a folder, decoded and augmented one by one."""

    def __init__(self, folder: Path) -> None:
        self._files = sorted(folder.glob("*.jpg"))

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, row: int) -> Sample:
        with Image.open(self._files[row]) as image:
            pixels = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).float() / 255
        top, left = torch.randint(SIDE - CROP + 1, (2,)).tolist()
        pixels = pixels[:, top : top + CROP, left : left + CROP]
        if torch.rand(()) < 0.5:
            pixels = pixels.flip(2)
        return (pixels * (0.8 + 0.4 * torch.rand(3, 1, 1))).contiguous(), row % 10


class Store(Dataset[Sample]):
    """Samples that arrive after a while, as from a disk in the network."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: int) -> Sample:
        time.sleep(LATENCY_S)
        return torch.full((3, 32, 32), row / self._count), row % 10


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 5, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(8 * 16, 10)
    )


class FetchTask(Task):
    """The network on a data set."""

    def __init__(self, dataset: Dataset[Sample]) -> None:
        self._dataset = dataset

    def model(self) -> nn.Module:
        return network()

    def data(self, slot: SiloSlot) -> SiloData:
        return SiloData(self._dataset, TensorDataset(torch.zeros(0, 3, 8, 8), torch.zeros(0, dtype=torch.long)))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    inputs, labels = batch
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), labels).backward()
    optimizer.step()


class Bare:
    """The loop that everyone writes; an epoch a call."""

    def __init__(self, dataset: Dataset[Sample], workers: int) -> None:
        self._model = network()
        self._loader = DataLoader(
            dataset, BATCH, shuffle=True, drop_last=True, num_workers=workers, persistent_workers=workers > 0
        )

    def __call__(self) -> None:
        optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)
        for batch in self._loader:
            step(self._model, optimizer, batch)


class Orders:
    """A trainer that is given an epoch in orders."""

    def __init__(self, trainer: LocalTrainer, steps: int) -> None:
        self._trainer = trainer
        self._steps = steps
        self._base = trainer.initial_model()
        self._cursor = Cursor()

    def __call__(self) -> None:
        left = self._steps
        while left:
            steps = min(STEPS, left)
            order = WorkOrder("u", 0, 1, BATCH, steps, 0.01, seed=left, evaluate=False)
            self._cursor = self._trainer.run(order, self._base, self._cursor).cursor
            left -= steps


def own_loop(dataset: Dataset[Sample], options: Mapping[str, Any]) -> SiloApp:
    """The loop of `Bare` as a `SiloApp`'s."""
    app = SiloApp()

    @app.setup()
    def setup(silo: Silo) -> Any:
        return silo.use(network, dataset)

    @app.train()
    def fit(work: Work, model: nn.Module, train: Dataset[Sample]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=work.learning_rate)
        for batch in work.loader(train, **options):
            step(model, optimizer, batch)

    return app


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; seconds are the least of the turns, which other programs disturbed least."""

    data: str
    loop: str
    workers: int
    epoch_s: float
    ratio: float
    turns: tuple[float, float, float]


def loops(dataset: Dataset[Sample], count: int, workers: int) -> dict[str, Callable[[], None]]:
    """The ways to train an epoch, by name; the bare one first."""
    options, steps, site = LocalOptions(device="cpu", workers=workers), count // BATCH, Silo(0, "silo-0", 7, "cpu")
    found: dict[str, Callable[[], None]] = {
        "bare": Bare(dataset, workers),
        "shipped": Orders(Trainer(FetchTask(dataset), SLOT, options), steps),
        "work.loader": Orders(GuestTrainer(own_loop(dataset, {"num_workers": workers}), site, options), steps),
    }
    if workers:
        anew = {"num_workers": workers, "persistent_workers": False}
        found["work.loader, workers anew"] = Orders(GuestTrainer(own_loop(dataset, anew), site, options), steps)
    return found


def measure(name: str, dataset: Dataset[Sample], count: int, workers: int, turns: int) -> list[Row]:
    ways = loops(dataset, count, workers)
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(turns + 1):
        order = list(ways) if turn % 2 else list(reversed(ways))
        for way in order:
            begun = perf_counter()
            ways[way]()
            if turn:  # the first one starts workers and warms the files
                taken[way].append(perf_counter() - begun)
    return [
        Row(
            data=name,
            loop=way,
            workers=workers,
            epoch_s=min(seconds),
            ratio=min(seconds) / min(taken["bare"]),
            turns=tuple(np.percentile(np.array(seconds) / np.array(taken["bare"]), [25, 50, 75]).tolist()),
        )
        for way, seconds in taken.items()
    ]


def write_jpegs(folder: Path, count: int) -> None:
    """Images with some structure, so that decoding takes what it takes for photographs."""
    generator = np.random.default_rng(7)
    for number in range(count):
        coarse = Image.fromarray(generator.integers(0, 256, (28, 28, 3), dtype=np.uint8))
        coarse.resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(folder / f"{number:05}.jpg", quality=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2000, help="samples of an epoch")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--out", type=Path, default=Path("bench/results/loader.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    rows: list[Row] = []
    begun_load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_jpegs(folder, options.images)
        for workers in options.workers:
            rows += measure("JPEGs", Jpegs(folder), options.images, workers, options.turns)
            rows += measure("10 ms a sample", Store(options.images), options.images, workers, options.turns)
    load = (begun_load, os.getloadavg()[0])
    cells = [
        (f"{row.data}, {row.loop}", row.workers, *(f"{each:.3f}" for each in (row.epoch_s, row.ratio, *row.turns)))
        for row in rows
    ]
    title = f"An epoch of {options.images} samples in orders of {STEPS} steps of {BATCH}; {os.cpu_count()} processors"
    print_table(
        f"{title}, load {load[0]:.1f} to {load[1]:.1f}", ("data, loop", "workers", "s", "over bare", "of turns"), cells
    )
    setting = {"torch": torch.__version__, "images": options.images, "turns": options.turns, "load": load}
    write_json(options.out, {"setting": setting, "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
