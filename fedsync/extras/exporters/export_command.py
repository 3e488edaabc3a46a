"""Command ``fedsync export``: a run's metrics, from its journal, for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsync.common.errors import ConfigError
from fedsync.observe.terminal import Terminal

if TYPE_CHECKING:
    from fedsync.observe.recorder import Exporter


def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a run.")],
    csv: Annotated[
        Path | None, typer.Option("--csv", help="Table of rounds; those of silos and metrics lie beside it.")
    ] = None,
    tensorboard: Annotated[Path | None, typer.Option("--tensorboard", help="Folder for an event file.")] = None,
    mlflow: Annotated[str | None, typer.Option("--mlflow", metavar="URI", help="Tracking URI.")] = None,
) -> None:
    """Write the rounds of a run, finished or not, for other programs."""
    from fedsync.extras.exporters.csv_exporter import CsvExporter, tables
    from fedsync.observe.ledger import Ledger
    from fedsync.observe.tail import Tail

    journal = folder / "journal.jsonl"
    if not journal.is_file():
        raise ConfigError(str(folder), "no run with a journal: journal.jsonl is not there", "Name the folder of a run")
    if csv is None and tensorboard is None and mlflow is None:
        raise ConfigError("export", "nowhere to write", "Add --csv FILE, --tensorboard DIR or --mlflow URI")
    tail, ledger = Tail(journal), Ledger()
    for entry in tail.entries():
        ledger.add(entry)
    exporters: list[Exporter] = []
    console = Terminal()
    try:
        if csv is not None:
            exporters.append(CsvExporter(csv))
            console.print(f"Tables: {', '.join(map(str, tables(csv)))}", soft_wrap=True)
        if tensorboard is not None:
            from fedsync.extras.exporters.tensorboard_exporter import TensorBoardExporter

            exporters.append(TensorBoardExporter(tensorboard))
            console.print(f"TensorBoard: {tensorboard}", soft_wrap=True)
        if mlflow is not None:
            from fedsync.extras.exporters.mlflow_exporter import MlflowExporter

            header = tail.header or {}
            exporters.append(MlflowExporter(mlflow, {**header.get("config", {}), "runtime": header.get("runtime")}))
            console.print("MLflow: one run in the experiment fedsync")
        for exporter in exporters:
            exporter.follow(ledger)
    finally:
        for exporter in exporters:
            exporter.close()
