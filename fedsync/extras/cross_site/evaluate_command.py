"""Command ``fedsync evaluate``: evaluation of models on the test data of silos."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from fedsync.common.errors import ConfigError
from fedsync.common.files import check_result, write_result
from fedsync.observe.tables import new_table
from fedsync.observe.terminal import Terminal

if TYPE_CHECKING:
    from fedsync.extras.cross_site.site_evaluation import Site

_SAMPLES, _METRIC = 15, 25
"""Widths of the column of samples, with the edges of a table, and of a metric with its interval."""


def evaluate(
    folder: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="Folder of a run whose data are on this machine.")
    ] = None,
    silo: Annotated[
        list[str] | None,
        typer.Option("--silo", metavar="NAME|FILE", help="A silo of the run, or at a real silo its silo.yaml."),
    ] = None,
    model: Annotated[
        Path | None, typer.Option("--model", metavar="FILE", help="A state dict; left out, best.pt and last.pt in DIR.")
    ] = None,
    run: Annotated[
        str | None, typer.Option("--run", help="At a real silo: run whose data is used; the newest by default.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="JSON to write; evaluated.json in DIR.")
    ] = None,
) -> None:
    """Evaluate models on the test data of a run's silos, or of a single real silo."""
    from fedsync.extras.cross_site.cross_site_matrix import ModelRow
    from fedsync.extras.cross_site.site_evaluation import evaluate as evaluated
    from fedsync.extras.cross_site.site_evaluation import models_of_run

    named, out = out is not None, out or (None if folder is None else folder / "evaluated.json")
    sites = _sites(folder, silo or [], run)
    if out is not None:
        check_result(out, "--out")
    models = [] if model is None else [(ModelRow("file", about={"file": str(model)}), model)]
    if model is None and folder is not None:
        models = models_of_run(folder)
    matrix = evaluated(sites, models)
    if not matrix.cells:
        raise ConfigError("fedsync evaluate", "no model here, or no usable evaluation of one", "Name one: --model FILE")
    document = matrix.document()
    console = Terminal()
    names = list(document["metrics"])
    size = max(1, (console.width - max(map(len, ["silo", *document["silos"]])) - _SAMPLES) // _METRIC)
    for row, each in enumerate(document["models"]):
        for start in range(0, len(names), size):
            console.print(_table(document, row, each, names[start : start + size]))
    if out is not None:
        write_result(out, (json.dumps(document, indent=2) + "\n").encode(), named=named)
        console.print(f"File: {out}", soft_wrap=True)


def _sites(folder: Path | None, silos: list[str], run: str | None) -> list[Site]:
    from fedsync.extras.cross_site.site_evaluation import site_here, sites_of_run

    files = [Path(each) for each in silos if Path(each).is_file()]
    if files:
        if len(silos) > 1:
            raise ConfigError("--silo", "a silo's file and further silos", "Name the file alone")
        return [site_here(files[0], run)]
    if folder is None:
        raise ConfigError("fedsync evaluate", "neither a run nor a silo's file is named", "Add DIR, or --silo FILE")
    if run is not None:
        raise ConfigError("--run", "DIR already names the run", "Leave --run out")
    return sites_of_run(folder, silos)


def _table(document: dict[str, Any], row: int, model: dict[str, Any], names: list[str]) -> Table:
    title = f"{model['subject']} model" + (f" of {model['silo']}" if model["silo"] else "")
    table = new_table(title, "silo", "samples", *names)
    lines = [(silo, [document["metrics"][name]["matrix"][row][place] for name in names])
             for place, silo in enumerate(document["silos"])]  # fmt: skip
    if model["silo"] is None and len(lines) > 1:
        lines.append(("pooled", [document["metrics"][name]["pooled"].get(model["subject"]) for name in names]))
    for silo, cells in lines:
        if any(cell is not None for cell in cells):
            support = max(sum(cell["support"].values()) for cell in cells if cell is not None)
            table.add_row(silo, str(support), *map(_shown, cells))
    return table


def _shown(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return ""
    if cell["value"] is None:
        return "not estimable"
    interval = "" if cell["low"] is None else f" [{cell['low']:.3f}, {cell['high']:.3f}]"
    return f"{cell['value']:.4f}{interval}"
