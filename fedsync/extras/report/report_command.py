"""Command ``fedsync report``, which writes a page about runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedsync.common.files import check_result, write_result
from fedsync.observe.terminal import Terminal


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
    from fedsync.extras.report.data import read_runs
    from fedsync.extras.report.report_page import page

    if out is not None:
        check_result(out, "--out")
    path = out or (folders[0] if len(folders) == 1 else Path()) / "report.html"
    # A shell's pattern for the runs of a comparison matches the comparison's own files, too.
    runs = read_runs([folder for folder in folders if not folder.is_file()] or folders)
    write_result(path, page(runs).encode(), named=out is not None)
    others = files_beside(runs)
    for name, text in others.items():
        write_result(path.with_name(name), text.encode(), named=False)
    Terminal().print(f"Report: {path}", soft_wrap=True)
    if others:
        Terminal().print(f"Beside it: {', '.join(others)}", soft_wrap=True)
    if open_it:
        typer.launch(path.resolve().as_uri())
