"""``fedsync tune``: the twin of a federation from a run of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedsync.common.files import check_result, write_result

if TYPE_CHECKING:
    from fedsync.sim.twin.fit import SiloFit
    from fedsync.sim.twin.twin import Predicted, Twin


def tune(
    folder: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run's files.")],
    silos: Annotated[
        Path | None, typer.Option("--silos", metavar="FILE", help="Silo file to write: the machines as fitted.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="JSON file with all figures.")] = None,
) -> None:
    """Fit simulated machines to a run's journal, and say how well they do what the run did."""
    from fedsync.sim.twin.records import read_record
    from fedsync.sim.twin.twin import Twin

    for path, option in ((silos, "--silos"), (out, "--out")):
        if path is not None:
            check_result(path, option)
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    record = read_record(folder)
    with console.status("replaying the run's strategy on its twin"):
        twin, replayed = Twin.of(record).checked()
    console.print(_machines(twin.fits))
    console.print(_said(twin, replayed), markup=False)
    figures: dict[str, Any] = {"silos": [fit.report() for fit in twin.fits], "replay": _replay(twin, replayed)}
    if silos is not None:
        files = twin.write(silos)
        console.print(f"Silo file: {', '.join(map(str, files))}", markup=False)
    if out is not None:
        write_result(out, (json.dumps(figures, indent=2) + "\n").encode())
        console.print(f"File: {out}", markup=False)


def _machines(fits: tuple[SiloFit, ...]) -> Table:
    table = Table(title="Machines as the journal shows them", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("silo", "orders", "samples/s", "ms a step", "jitter", "overhead s", "Mbit/s", "load", "away"):
        table.add_column(column, justify="left" if column in ("silo", "load") else "right", no_wrap=column != "load")
    for fit in fits:
        config = fit.config
        launch_s = getattr(config.curve, "launch_s", 0.0)
        table.add_row(
            escape(config.name),
            str(fit.orders),
            f"{config.speed:.4g}",
            f"{1e3 * launch_s:.3g}" if launch_s else "-",
            f"{config.jitter:.2f}" if config.jitter else "-",
            f"{config.overhead_s:.3g}" if config.overhead_s else "-",
            f"{config.bandwidth_mbps:.4g}" if config.bandwidth_mbps else "-",
            fit.load,
            str(fit.crashes) if fit.crashes else "-",
        )
    return table


def _said(twin: Twin, replayed: Predicted) -> str:
    actual = "one round only" if twin.actual_s is None else f"{twin.actual_s:.3g}"
    said = f"{twin.config.name}, seconds a round: {replayed.round_s} predicted with 90 %, {actual} actual"
    if twin.wider:
        said += f"; intervals of others are {100 * twin.wider:.0f} % wider each way, as the run lies outside its own"
    return said


def _replay(twin: Twin, replayed: Predicted) -> dict[str, Any]:
    interval = replayed.round_s
    return {
        "strategy": twin.config.name,
        "actual_s": twin.actual_s,
        "predicted_s": interval.mean,
        "low_s": interval.low,
        "high_s": interval.high,
    }
