"""Command ``fedsync probe``: measurement of this machine's training speed, as an entry for a silo file."""

from __future__ import annotations

import platform
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
import yaml
from rich.progress import BarColumn, Progress, TimeElapsedColumn
from rich.table import Table

from fedsync.common.files import check_result, write_result
from fedsync.config.cluster import AffineCurveConfig, ClusterConfig, LinearCurveConfig, SiloConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.config.tasks.task_kinds import CsvConfig
from fedsync.core.speed.curve import Curve
from fedsync.observe.tables import new_table
from fedsync.observe.terminal import Terminal, WordsColumn

if TYPE_CHECKING:
    from fedsync.train.loop import Trainer
    from fedsync.train.machine.measure import Measurement

_FASTEST = 1e9
_LINEAR = 0.01
"""Step time at batch 0 below which a curve counts as linear, as a share of the time of its largest batch."""


def probe(
    task: Annotated[
        str, typer.Option("--task", help="Strategy file whose task is trained: a path, or the name of a shipped one.")
    ] = "lb-bsp",
    device: Annotated[
        str | None, typer.Option("--device", help="auto, cpu, cuda or cuda:0; the strategy's by default.")
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=0.1, help="About how long to measure.")] = 20.0,
    out: Annotated[Path | None, typer.Option("--out", help="Silo file to write.")] = None,
) -> None:
    """Measure this machine: its step time by batch size, and the entry for a silo file."""
    from fedsync.train.machine.measure import measure

    if out is not None:
        check_result(out, "--out")
    trainer, name = _trainer(task, device)
    bar = Progress(
        WordsColumn("{task.description}", "bold"), BarColumn(), TimeElapsedColumn(), console=Terminal(stderr=True)
    )
    with bar:
        line = bar.add_task("batch", total=1.0)
        measured = measure(
            trainer, seconds, watch=lambda batch, gone: bar.update(line, description=f"batch {batch}", completed=gone)
        )
        bar.update(line, completed=1.0)
    curve = measured.fit()
    console = Terminal()
    console.print(f"{name} on {trainer.device}, {trainer.examples} training samples")
    console.print(_table(measured, curve))
    text = silo_file(curve, measured.timings[-1].batch, measured.memory_samples)
    # Plain text, because a terminal would wrap it.
    sys.stdout.write(text)
    if out is not None:
        write_result(out, text.encode())
        console.print(f"File: {out}")


def _trainer(task: str, device: str | None) -> tuple[Trainer, str]:
    from fedsync.tasks.task_protocol import SiloSlot
    from fedsync.train.loop import Trainer
    from fedsync.train.machine.device import resolve

    config = StrategyConfig.load(task)
    options = config.local.build()
    if device is not None:
        resolve(device, "--device")
        options = replace(options, device=device)
    # Use all data, unless the task has one file per silo: more data allow larger test batches.
    silos = len(config.task.files or (1,)) if isinstance(config.task, CsvConfig) else 1
    slot = SiloSlot(platform.node() or "silo", 0, silos, config.seed)
    return Trainer(config.task.build(), slot, options), config.name


def _table(measured: Measurement, curve: Curve) -> Table:
    table = new_table(None, "batch", "measured ms", "least", "most", "fitted ms", "off", "samples/s")
    for timing in measured.timings:
        measured_s, fitted_s = timing.step_s, curve.step_s(timing.batch)
        table.add_row(
            str(timing.batch),
            *(f"{1e3 * value:.3f}" for value in (measured_s, min(timing.seconds), max(timing.seconds), fitted_s)),
            f"{fitted_s / measured_s - 1:+.1%}",
            f"{timing.batch / measured_s:.0f}",
        )
    return table


def silo_file(curve: Curve, largest: int, memory_samples: int | None) -> str:
    shape: LinearCurveConfig | AffineCurveConfig = LinearCurveConfig(kind="linear")
    if curve.step_s(0) > _LINEAR * curve.step_s(largest):
        shape = AffineCurveConfig(kind="affine", launch_s=_rounded(curve.launch_s), saturation=round(curve.saturation))
    silo = SiloConfig(
        name=re.sub(r"[^A-Za-z0-9._-]", "-", platform.node()).lstrip(".")[:64] or "silo",
        speed=min(_rounded(curve.speed), _FASTEST),
        curve=shape,
        memory_samples=memory_samples,
    )
    return yaml.safe_dump({"silos": ClusterConfig(silos=[silo]).entries()}, sort_keys=False)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
