"""Time every method of `fedsync.barrier.zipline` on tables like the paper's: Table 4 (time) and Table 3 (success).

    python bench/zipline.py [--out bench/results/zipline.json]

Run from the root of the repository with it on PYTHONPATH. Exits with 1 if `sweep` misses a target. Stops within two
minutes: a cell that would take longer than the others together is skipped, and so is all that is left after `BUDGET_S`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from fedsync.barrier.zipline import METHODS, NAIVE_LIMIT, find_sync_point

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


@dataclass(frozen=True, slots=True)
class Cell:
    """One line of the table.

    Args:
        n: silos.
        r: predicted steps.
        method: key of `METHODS`.
        runs: calls timed, each on a table of its own.
        median_ms: median time of a call [ms], None if skipped.
        ratio: median over that of sweep.
        success: share of the runs that found the least waiting.
        waiting_ms: mean waiting found [ms of the tables' clock].
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
        before = perf_counter()
        point = find_sync_point(ends, method)
        times.append((perf_counter() - before) * 1e3)
        waiting.append(point.waiting)
    return times, waiting


def bench() -> list[Cell]:
    """All cells, sweep first in each size."""
    cells = []
    began = perf_counter()
    for n, r in SIZES:
        tables = [predicted_ends(n, r, seed) for seed in range(TABLES)]
        sweep_times, least = measure("sweep", tables)
        for method in METHODS:
            paper = PAPER_MS.get(method, {}).get((n, r))
            if too_much(method, n, r) or perf_counter() - began > BUDGET_S:
                cells.append(Cell(n, r, method, 0, None, None, None, None, paper))
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
                    paper_ms=paper,
                )
            )
    return cells


def show(cells: list[Cell]) -> None:
    """Print the aligned table."""

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    head = ("method", "n", "R", "runs", "median [ms]", "x sweep", "success", "waiting [ms]", "paper [ms]")
    line = "{:<15} {:>5} {:>4} {:>5} {:>12} {:>9} {:>8} {:>13} {:>11}"
    size = None
    print(line.format(*head))
    for cell in cells:
        if size not in (None, (cell.n, cell.r)):
            print()
        size = (cell.n, cell.r)
        print(
            line.format(
                cell.method,
                cell.n,
                cell.r,
                cell.runs or "-",
                number(cell.median_ms, ".3f"),
                number(cell.ratio, ".1f"),
                number(cell.success, ".0%"),
                number(cell.waiting_ms, ".1f"),
                number(cell.paper_ms, ".3f"),
            )
        )


def main() -> int:
    """Run, print, write; 1 if a target is missed."""
    parser = argparse.ArgumentParser(description="Time the methods that find ElasticBSP's sync point.")
    parser.add_argument("--out", type=Path, default=Path("bench/results/zipline.json"), help="JSON file to write")
    out: Path = parser.parse_args().out
    cells = bench()
    show(cells)
    print()
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
    out.parent.mkdir(parents=True, exist_ok=True)
    report = {"bench": "zipline", "machine": machine, "targets": targets, "cells": [asdict(cell) for cell in cells]}
    out.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if len(targets) == len(TARGETS_MS) and all(target["met"] for target in targets) else 1


if __name__ == "__main__":
    sys.exit(main())
