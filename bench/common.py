"""Shared code of the benches: a second process, tables, JSON, and figures that are also readable in greyscale.

Series look as in reports, see `fedsync.extras.report.style`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from fedsync.extras.report.style import GRID, MARKERS, SERIES, bars, series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Job = TypeVar("Job")
Done = TypeVar("Done")


def in_parallel(function: Callable[[Job], Done], jobs: Sequence[Job], processes: int) -> list[Done]:
    """Results of all jobs, in their order; each process has one thread.

    Args:
        function: of a module, for another process is to find it.
        jobs: values that pickle; the longest first, if that is known.
        processes: 1 runs all jobs here.
    """
    console = Console(stderr=True)
    if processes == 1 or len(jobs) == 1:
        return [function(job) for job in track(jobs, description="runs", console=console)]
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn) as pool:
        return list(track(pool.map(function, jobs), total=len(jobs), description="runs", console=console))


def alternated(one: Callable[[], Job], other: Callable[[], Done], pairs: int) -> tuple[list[Job], list[Done]]:
    """Results of both, called ``pairs`` times each, ``other`` first every other time: what drifts hits both alike."""
    ones: list[Job] = []
    others: list[Done] = []
    for pair in range(pairs):
        if pair % 2:
            ones.append(one())
        others.append(other())
        if not pair % 2:
            ones.append(one())
    return ones, others


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """An aligned table on standard output; the first column is text, the others are numbers."""
    table = Table(box=box.SIMPLE_HEAD)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    console = Console(width=160, highlight=False, markup=False)  # units stand in square brackets
    console.print(title)  # as the table's own it would be broken to the table's width
    console.print(table)


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """The same for a page."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "|".join(["---"] + ["---:"] * (len(columns) - 1)) + "|"]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def write_json(out: Path, value: object) -> None:
    """Write a bench's results."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def figure(columns: int = 1, rows: int = 1, width: float = 5.0, height: float = 3.6) -> tuple[Figure, list[Axes]]:
    """A figure without a window, and its axes row by row; sizes are of one of them [inches]."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True}
    with pyplot.rc_context(style):
        made, axes = pyplot.subplots(rows, columns, figsize=(width * columns, height * rows), squeeze=False)
    for ax in axes.flat:
        ax.grid(color=GRID, linewidth=0.6)
    return made, list(axes.flat)


def line(index: int, *, marker: bool = True) -> dict[str, Any]:
    """How series number ``index`` is drawn as a line."""
    style = {**series(index), "linewidth": 1.6}
    return {**style, "marker": MARKERS[index % SERIES], "markersize": 4.5} if marker else style


def bar(index: int) -> dict[str, Any]:
    """How series number ``index`` is drawn as bars."""
    return bars(index)


def save(made: Figure, path: Path) -> None:
    """Write a figure as PNG and forget it."""
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    made.tight_layout()
    made.savefig(path, dpi=130)
    pyplot.close(made)
    Console(stderr=True).print(f"Figure: {path}", highlight=False)


def beside(out: Path, suffix: str = "") -> Path:
    """The PNG beside a JSON file."""
    return out.with_name(f"{out.stem}{suffix}.png")
