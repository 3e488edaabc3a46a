"""Cost and gain of ElasticBSP's search: like tables 3 and 4 and figures 10 and 14 of "ZipLine".

    python bench/papers/zipline.py [--parts search training] [--quick] [--out FILE.json]

- ``search``: every method of `fedsync.policies.barrier.kinds.elastic` on tables like the paper's: processor time (Table
  4, Figure 10) and success (Table 3). Ends within two minutes: it skips a cell that would take longer than the others
  together, and all that is left after `BUDGET_S`. The command ends with 1 if `sweep` misses a target.
- ``training``: ElasticBSP against BSP, SSP and ASP (Figure 14); see `zipline_training.py` beside this one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.common import beside, figure, line, print_table, save, write_json
from bench.papers.zipline_training import show_training, training
from fedsync.extras.zipline_published import NAIVE_LIMIT
from fedsync.policies.barrier.kinds.elastic import METHODS, find_sync_point

PARTS = ("search", "training")
SIZES = ((5, 8), (10, 15), (10, 150), (100, 15), (100, 150), (1000, 15), (1000, 150))
TABLES = 10
CELL_S = 5.0
BUDGET_S = 90.0
FULL_GRID_LIMIT = 10**9  # n^2 R^2 element operations: some seconds
TARGETS_MS = {(1000, 150): 30.0, (10, 15): 0.2}

PAPER_MS: dict[str, dict[tuple[int, int], float]] = {  # Table 4, C++11 on a Xeon E5-2620 v3
    method: dict(zip(SIZES[1:], times, strict=True))
    for method, times in {
        "zipline": (0.149, 1.32, 6.37, 49.9, 253.0, 2380.0),
        "zipline_opt": (0.090, 0.808, 2.46, 19.3, 93.9, 778.0),
        "zipline_opt_bs": (0.124, 1.15, 2.65, 23.0, 76.8, 566.0),
        "full_grid_scan": (1.54, 46.7, 81.3, 2150.0, 4040.0, 207_000.0),
        "grid_scan": (0.168, 5.50, 1.11, 43.8, 7.45, 257.0),
    }.items()
}
PAPER_LEAST_MS = dict(zip(SIZES[1:], (599, 518, 1228, 1175, 1403, 1382), strict=True))  # Table 3


@dataclass(frozen=True, slots=True)
class Cell:
    """One line of the table.

    Args:
        n: silos.
        r: predicted steps.
        method: key of `METHODS`.
        runs: calls timed, each on a table of its own.
        median_ms: median processor time of a call [ms], None if skipped.
        ratio: median over that of sweep.
        success: share of the runs that found the least waiting.
        waiting_ms: mean waiting found [ms of the tables' clock].
        excess: mean share by which that exceeds the least on the same tables.
        paper_ms: the paper's mean time [ms], None where it has none.
    """

    n: int
    r: int
    method: str
    runs: int
    median_ms: float | None
    ratio: float | None
    success: float | None
    waiting_ms: float | None
    excess: float | None
    paper_ms: float | None


def predicted_ends(n: int, r: int, seed: int) -> NDArray[np.float64]:
    """Ends of the next r steps [ms], shape [n, r], as section 6.1 makes them.

    A silo starts at 10 to 50 ms and takes 1000 to 1500 ms a step. All have run for 150 s, so their phases are mixed:
    from a common start the first steps would always lie within 540 ms, and Table 3 has more.
    """
    rng = np.random.default_rng(seed)
    interval = rng.uniform(1000.0, 1500.0, n)
    start = rng.uniform(10.0, 50.0, n)
    done = np.floor((150_000.0 - start) / interval)
    step = done[:, None] + np.arange(1, r + 1)
    return start[:, None] + interval[:, None] * step


def too_much(method: str, n: int, r: int) -> bool:
    """Whether one call would take too long for this bench."""
    return (method == "full_grid_scan" and (n * r) ** 2 > FULL_GRID_LIMIT) or (method == "naive" and r**n > NAIVE_LIMIT)


def measure(method: str, tables: list[NDArray[np.float64]]) -> tuple[list[float], list[float]]:
    """Times of a call [ms] and waiting found [ms], a table each, until `CELL_S` have passed."""
    times: list[float] = []
    waiting: list[float] = []
    find_sync_point(tables[0][:2, :2], method)  # first calls pay for imports and caches
    began = perf_counter()
    for ends in tables:
        if times and perf_counter() - began > CELL_S:
            break
        before = process_time()
        point = find_sync_point(ends, method)
        times.append((process_time() - before) * 1e3)
        waiting.append(point.waiting)
    return times, waiting


def bench(sizes: Sequence[tuple[int, int]]) -> list[Cell]:
    """All cells, sweep first in each size."""
    cells = []
    began = perf_counter()
    for n, r in sizes:
        tables = [predicted_ends(n, r, seed) for seed in range(TABLES)]
        sweep_times, least = measure("sweep", tables)
        for method in METHODS:
            paper = PAPER_MS.get(method, {}).get((n, r))
            if too_much(method, n, r) or perf_counter() - began > BUDGET_S:
                cells.append(Cell(n, r, method, 0, None, None, None, None, None, paper))
                continue
            times, waiting = (sweep_times, least) if method == "sweep" else measure(method, tables)
            hits = sum(found == best for found, best in zip(waiting, least, strict=False))
            cells.append(
                Cell(
                    n,
                    r,
                    method,
                    runs=len(times),
                    median_ms=median(times),
                    ratio=median(times) / median(sweep_times),
                    success=hits / len(times),
                    waiting_ms=float(np.mean(waiting)),
                    excess=float(np.mean([found / best - 1 for found, best in zip(waiting, least, strict=False)])),
                    paper_ms=paper,
                )
            )
    return cells


def show(cells: list[Cell], out: Path) -> None:
    """Print Table 4 and Table 3, and draw the times over the number of silos."""
    sizes = list(dict.fromkeys((cell.n, cell.r) for cell in cells))
    found = {(cell.method, cell.n, cell.r): cell for cell in cells}
    columns = ("method", *(f"{n} x {r}" for n, r in sizes))

    def time(cell: Cell) -> str:
        taken = "-" if cell.median_ms is None else f"{cell.median_ms:.3g}"
        return taken if cell.paper_ms is None else f"{taken} ({cell.paper_ms:.3g})"

    def waiting(cell: Cell) -> str:
        if cell.waiting_ms is None:
            return "-"
        if cell.method != "sweep":
            return f"{cell.success:.0%}, {cell.excess:+.1%}"
        paper = PAPER_LEAST_MS.get((cell.n, cell.r))
        return f"{cell.waiting_ms:.0f} ms" + (f" ({paper})" if paper else "")

    print_table(
        "Milliseconds of processor time for a sync point of silos x steps, medians; in brackets the paper's table 4",
        columns,
        [(method, *(time(found[method, n, r]) for n, r in sizes)) for method in METHODS],
    )
    print_table(
        "Waiting: the least, in brackets the paper's; how often it was found, and the mean excess (cf. table 3)",
        columns,
        [(method, *(waiting(found[method, n, r]) for n, r in sizes)) for method in METHODS],
    )
    draw(cells, out)


def draw(cells: list[Cell], out: Path) -> None:
    """Times over the number of silos, an axis a look-ahead, as figure 10."""
    looks = [r for r in dict.fromkeys(cell.r for cell in cells) if len({cell.n for cell in cells if cell.r == r}) > 1]
    if not looks:
        return
    made, axes = figure(len(looks))
    for ax, r in zip(axes, looks, strict=True):
        for index, method in enumerate(METHODS):
            mine = [cell for cell in cells if (cell.method, cell.r) == (method, r)]
            times = {cell.n: cell.median_ms for cell in mine if cell.median_ms is not None}
            if times:
                ax.plot(list(times), list(times.values()), **line(index), label=method)
        ax.set(title=f"R = {r} (cf. figure 10)", xlabel="silos", ylabel="time [ms]", xscale="log", yscale="log")
    limits = [ax.get_ylim() for ax in axes]
    for ax in axes:
        ax.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
    axes[0].legend(fontsize=7, frameon=False)
    save(made, beside(out, "-search"))


def search(out: Path, quick: bool) -> dict[str, Any]:
    """Measure, show, and say which targets were met."""
    cells = bench(SIZES[1:4] if quick else SIZES)
    show(cells, out)
    targets = []
    for cell in cells:
        limit = TARGETS_MS.get((cell.n, cell.r))
        if cell.method != "sweep" or limit is None or cell.median_ms is None:
            continue
        met = cell.median_ms <= limit
        targets.append({"n": cell.n, "r": cell.r, "limit_ms": limit, "median_ms": cell.median_ms, "met": met})
        verdict = "met" if met else "MISSED"
        print(f"target n={cell.n} R={cell.r}: at most {limit} ms, took {cell.median_ms:.3f} ms: {verdict}")
    machine = {
        "processor": platform.machine(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    return {"machine": machine, "targets": targets, "cells": [asdict(cell) for cell in cells]}


def main() -> int:
    """Run, print, write; 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it works")
    parser.add_argument("--processes", type=int, default=2, help="of the training")
    parser.add_argument("--out", type=Path, default=Path("bench/results/zipline.json"), help="JSON file to write")
    options = parser.parse_args()
    # Parts that are not run keep their results.
    results: dict[str, Any] = json.loads(options.out.read_text()) if options.out.is_file() else {}
    if "search" in options.parts:
        results["search"] = search(options.out, options.quick)
    if "training" in options.parts:
        results["training"] = training(options.quick, options.processes)
        show_training(results["training"], options.out)
    write_json(options.out, results)
    missed = "search" in options.parts and not all(target["met"] for target in results["search"]["targets"])
    return int(missed and not options.quick)


if __name__ == "__main__":
    sys.exit(main())
