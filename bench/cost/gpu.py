"""The client on a GPU: cost of its loop, time of a step by batch size, and recovery from out-of-memory errors.

- Cost: `Trainer.run` against a usual PyTorch loop, over the same ResNet-32 for pictures of 32 x 32
  (0.46 million parameters), batches of 128, in fp32, bf16 and fp16. Repetitions alternate within one process, and
  ratios are taken pair by pair. "steps" is the report's compute time; "run" is the whole call, with
  setting the weights, a fresh optimizer and reading the update.
- Curve: seconds a step by batch size and the fitted ``max(c, a + b x)``, by `bench.cost.step_times`.
- Memory: torch may use only a part of the GPU's memory (on a processor, failing allocations are simulated), and an
  order needs far more. The figures are the size of the pieces into which the order is split, and the cap that a
  search finds.

Without a GPU it prints that and ends; ``--device cpu`` runs it on the processor, which tests the script only.

    python bench/cost/gpu.py [--device auto] [--pairs 30] [--steps 100] [--seconds 20] [--out bench/results/gpu.json]
"""

from __future__ import annotations

import argparse
import platform
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from bench.common import alternated, beside, figure, line, print_table, save, write_json
from bench.cost.step_times import Measurement, measure
from fedsync.common.errors import ConfigError
from fedsync.core.orders import Cursor, WorkOrder
from fedsync.tasks.task_protocol import Batch, SiloData, SiloSlot, Task
from fedsync.train.batches import Sampler
from fedsync.train.loop import Trainer
from fedsync.train.machine.device import Precision, PrecisionName, resolve, synchronise
from fedsync.train.options import LocalOptions

SLOT = SiloSlot("silo-0", 0, 1, 7)
PRECISIONS: tuple[PrecisionName, ...] = get_args(PrecisionName)
GIB = 2**30


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        # He et al.'s option A: no parameters, zeros for the channels that are new.
        self.stride, self.more = stride, after - before

    def forward(self, inputs: Tensor) -> Tensor:
        around = inputs[:, :, :: self.stride, :: self.stride]
        if self.more:
            around = nn.functional.pad(around, (0, 0, 0, 0, self.more // 2, self.more - self.more // 2))
        return nn.functional.relu(self.inner(inputs) + around)


class Pictures(Task):
    """Random pictures of ten classes for a ResNet of 6 n + 2 layers: timing needs nothing that can be learned.

    Args:
        examples: pictures.
        side: of a picture [pixels].
        blocks: n; 5 make ResNet-32.
        fits: acts a memory that ends at so many samples; 0 does not.
        layout: memory layout of the convolutions.

    Source: He et al. 2016, arXiv:1512.03385, section 4.2.
    """

    def __init__(
        self,
        examples: int,
        side: int,
        blocks: int,
        fits: int = 0,
        layout: torch.memory_format = torch.contiguous_format,
    ) -> None:
        self.examples, self.side, self.blocks, self.fits, self.layout = examples, side, blocks, fits, layout

    def model(self) -> nn.Module:
        layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
        before = 16
        for after in (16, 32, 64):
            for index in range(self.blocks):
                layers.append(Block(before, after, 2 if index == 0 and after > 16 else 1))
                before = after
        network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
        return network.to(memory_format=self.layout)  # type: ignore[call-overload]  # torch's types know no such keyword

    def data(self, slot: SiloSlot) -> SiloData:
        generator = torch.Generator().manual_seed(slot.seed)
        pictures = torch.randn(self.examples, 3, self.side, self.side, generator=generator)
        labels = torch.randint(10, (self.examples,), generator=generator)
        return SiloData(TensorDataset(pictures, labels), TensorDataset(pictures[:1], labels[:1]))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        if self.fits and len(batch[0]) > self.fits:
            raise torch.OutOfMemoryError("acted")
        return super().loss(model, batch)


@dataclass(frozen=True, slots=True)
class Cost:
    """One line of the table; medians over the pairs."""

    precision: str
    layout: str
    batch_size: int
    steps: int
    bare_ms: float
    run_ms: float
    steps_ratio: float
    run_ratio: float
    run_ratio_quartiles: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Memory:
    """An order that did not fit, and the cap that was found by running into it and by looking for it."""

    asked: int
    piece: int | None
    found: int | None
    steps: int
    loss: float


class Bare:
    """The loop that everyone writes, over batches drawn beforehand."""

    def __init__(self, task: Task, order: WorkOrder, options: LocalOptions) -> None:
        self._device = resolve(options.device)
        self._precision = options.precision
        train = task.data(SLOT).train
        assert isinstance(train, TensorDataset)
        self._inputs, self._labels = (tensor.to(self._device) for tensor in train.tensors)
        self._model = task.model().to(self._device).train()
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=order.learning_rate)
        sampler, cursor = Sampler(len(train), SLOT.seed, SLOT.name), Cursor()
        self._batches = []
        for _ in range(order.max_steps):
            rows, cursor = sampler.take(cursor, order.batch_size)
            self._batches.append(torch.from_numpy(rows.copy()).to(self._device))

    def run(self) -> float:
        """Seconds of one pass over the batches."""
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self._precision)
        scaler = torch.amp.GradScaler(self._device.type, enabled=dtype is torch.float16, init_scale=2.0**12)
        synchronise(self._device)
        start_s = perf_counter()
        for batch in self._batches:
            inputs, labels = self._inputs.index_select(0, batch), self._labels.index_select(0, batch)
            self._optimizer.zero_grad()
            with torch.autocast(self._device.type, dtype, enabled=dtype is not None):
                loss = nn.functional.cross_entropy(self._model(inputs), labels)
            scaler.scale(loss).backward()
            scaler.step(self._optimizer)
            scaler.update()
        synchronise(self._device)
        return perf_counter() - start_s


def cost(task: Pictures, options: LocalOptions, order: WorkOrder, pairs: int) -> Cost:
    """Alternate both loops ``pairs`` times, each going first every other time."""
    bare, trainer = Bare(task, order, options), Trainer(task, SLOT, options)
    base = trainer.initial_model()

    def run() -> tuple[float, float]:
        start_s = perf_counter()
        outcome = trainer.run(order, base, Cursor())
        return perf_counter() - start_s, outcome.report.compute_s

    bare.run()
    run()
    bares, runs = alternated(bare.run, run, pairs)
    bare_s = np.array(bares)
    run_s, steps_s = np.array(runs).T
    low, high = np.percentile(run_s / bare_s, [25, 75])
    return Cost(
        precision=options.precision,
        layout=str(task.layout).removeprefix("torch."),
        batch_size=order.batch_size,
        steps=order.max_steps,
        bare_ms=1e3 * float(np.median(bare_s)),
        run_ms=1e3 * float(np.median(run_s)),
        steps_ratio=float(np.median(steps_s / bare_s)),
        run_ratio=float(np.median(run_s / bare_s)),
        run_ratio_quartiles=(float(low), float(high)),
    )


def memory(task: Pictures, options: LocalOptions, asked: int) -> Memory:
    """Give an order that does not fit, and have the cap looked for besides."""
    device = resolve(options.device)
    if device.type == "cuda":
        share = GIB / torch.cuda.get_device_properties(device).total_memory
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(share, device)
    else:
        task = Pictures(task.examples, task.side, task.blocks, fits=max(asked // 5, 1))
    order = WorkOrder("u", 0, 1, asked, 2, 0.01, seed=1, evaluate=False)
    trainer = Trainer(task, SLOT, options)
    report = trainer.run(order, trainer.initial_model(), Cursor()).report
    found = Trainer(task, SLOT, options).find_batch_cap()
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    return Memory(asked, report.batch_cap, found, report.steps, report.loss)


def draw(curves: dict[str, Measurement], out: Path) -> None:
    """Measured times as points, fitted curves as lines, over the batch size."""
    made, (ax,) = figure()
    for index, (name, measured) in enumerate(curves.items()):
        style = line(index)
        sizes = [timing.batch for timing in measured.timings]
        curve = measured.fit()
        ax.plot(sizes, [1e3 * curve.step_s(size) for size in sizes], **{**style, "marker": ""}, label=f"{name}, fitted")
        ax.plot(sizes, [1e3 * timing.step_s for timing in measured.timings], **{**style, "linestyle": ""}, label=name)
    ax.set(xscale="log", yscale="log", xlabel="batch [samples]", ylabel="time of a step [ms]")
    ax.legend()
    save(made, beside(out))


def supported(options: LocalOptions) -> bool:
    """Whether the device can compute in that precision."""
    try:
        Precision(options.precision, resolve(options.device))
    except ConfigError as error:
        print(f"{options.precision}: {error.problem}")
        return False
    return True


def show_costs(costs: list[Cost], device: torch.device, pairs: int) -> None:
    """The first table."""
    print_table(
        f"Trainer.run against the bare loop on {device}; ratios are medians over {pairs} pairs",
        ["precision", "layout", "batch", "steps", "bare ms", "run ms", "steps/bare", "run/bare", "quartiles"],
        [
            (
                *(row.precision, row.layout, row.batch_size, row.steps, f"{row.bare_ms:.2f}", f"{row.run_ms:.2f}"),
                *(f"{row.steps_ratio:.3f}", f"{row.run_ratio:.3f}", "{:.3f}-{:.3f}".format(*row.run_ratio_quartiles)),
            )
            for row in costs
        ],
    )


def show_curve(name: str, measured: Measurement) -> None:
    """One table a precision."""
    curve = measured.fit()
    print_table(
        f"{name}: a step takes {1e3 * curve.launch_s:.3f} ms + max(x, {curve.saturation:.0f}) / {curve.speed:.0f} s",
        ["batch", "measured ms", "fitted ms"],
        [
            (timing.batch, f"{1e3 * timing.step_s:.3f}", f"{1e3 * curve.step_s(timing.batch):.3f}")
            for timing in measured.timings
        ],
    )


def show_memory(ends: dict[str, Memory], device: torch.device) -> None:
    """The last table."""
    print_table(
        "an order that is too large, " + ("with 1 GiB of the GPU's memory" if device.type == "cuda" else "acted"),
        ["precision", "asked", "done in pieces of", "cap found by looking", "steps", "loss"],
        [(name, end.asked, end.piece, end.found, end.steps, f"{end.loss:.3f}") for name, end in ends.items()],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cuda, cuda:0 or cpu")
    parser.add_argument("--pairs", type=int, default=30, help="repetitions of both loops")
    parser.add_argument("--steps", type=int, default=100, help="local steps an order")
    parser.add_argument("--seconds", type=float, default=20.0, help="for each curve")
    parser.add_argument("--quick", action="store_true", help="a small network and few repetitions, to test the script")
    parser.add_argument("--out", type=Path, default=Path("bench/results/gpu.json"))
    arguments = parser.parse_args()
    device = resolve(arguments.device)
    on_gpu = device.type == "cuda"
    if not on_gpu and arguments.device == "auto":
        print("torch sees no GPU: nothing measured. --device cpu runs the script on the processor.")
        return
    task, batch_size, asked = Pictures(4096, 32, blocks=5), 128, 4096
    if arguments.quick:
        task, batch_size, asked = Pictures(16, 8, blocks=1), 4, 10
        arguments.pairs, arguments.steps, arguments.seconds = 2, 2, 0.5
    if not on_gpu:
        torch.set_num_threads(1)
    order = WorkOrder("u", 0, 1, batch_size, arguments.steps, 0.01, seed=1, evaluate=False)
    plain = LocalOptions(device=str(device), threads=None if on_gpu else 1)
    every = [option for option in (replace(plain, precision=name) for name in PRECISIONS) if supported(option)]
    layouts = (task, Pictures(task.examples, task.side, task.blocks, layout=torch.channels_last))
    costs = [cost(each, option, order, arguments.pairs) for each in layouts for option in every]
    show_costs(costs, device, arguments.pairs)
    curves = {option.precision: measure(Trainer(task, SLOT, option), arguments.seconds) for option in every}
    for name, measured in curves.items():
        show_curve(name, measured)
    ends = {option.precision: memory(task, option, asked) for option in every}
    show_memory(ends, device)
    setting = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.machine(),
    }
    fits = {name: {**asdict(measured), "fit": asdict(measured.fit())} for name, measured in curves.items()}
    caps = {name: asdict(end) for name, end in ends.items()}
    rows = [asdict(row) for row in costs]
    write_json(arguments.out, {"setting": setting, "cost": rows, "curves": fits, "memory": caps})
    draw(curves, arguments.out)


if __name__ == "__main__":
    main()
