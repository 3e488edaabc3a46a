"""Commands that show a run: ``fedsync watch`` while it works, then ``fedsync report`` and ``fedsync statistics``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedsync.common.errors import ConfigError
from fedsync.common.files import check_result, write_result
from fedsync.observe.terminal import Terminal


def watch(folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a run.")]) -> None:
    """Show the busy and waiting silos of a run until it ends; Ctrl-C ends only the display."""
    from fedsync.observe.live import watch as show

    show(folder, Terminal())


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders of runs.")],
    out: Annotated[Path | None, typer.Option("--out", help="File to write.")] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
) -> None:
    """Write one self-contained HTML page about a run, or about several runs side by side.

    The page is report.html in the folder of the run, or in the current folder for several runs.
    For a single run, the model card and the results as tables for a paper are written beside it.
    """
    from fedsync.extras.papers.paper import files_beside
    from fedsync.observe.report.data import read_runs
    from fedsync.observe.report.report_page import page

    if out is not None:
        check_result(out, "--out")
    path = out or (folders[0] if len(folders) == 1 else Path()) / "report.html"
    runs = read_runs(folders)
    write_result(path, page(runs).encode(), named=out is not None)
    others = files_beside(runs)
    for name, text in others.items():
        write_result(path.with_name(name), text.encode(), named=False)
    Terminal().print(f"Report: {path}", soft_wrap=True)
    if others:
        Terminal().print(f"Beside it: {', '.join(others)}", soft_wrap=True)
    if open_it:
        typer.launch(path.resolve().as_uri())


def statistics(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of a run, or of a silo's trainer in an encrypted run.")
    ],
) -> None:
    """Show the column statistics of all silos, if the run's task asked for them."""
    from fedsync.evaluation.survey.findings import STATISTICS
    from fedsync.observe.tables import statistics_table

    path = folder / STATISTICS
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        table = statistics_table(found)
    except FileNotFoundError:
        remedy = "Ask for them: task.standardise: federated. In an encrypted run the silos have them"
        raise ConfigError(str(path), "there are no statistics of this run", remedy) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(str(path), "this is no file of statistics", "Name the folder of a run") from error
    Terminal().print(table)
