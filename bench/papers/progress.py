"""Progress of silos, and its spread, under ASP, BSP, SSP, pBSP and pSSP: like the figures of PSP, section 10.6.

    python bench/papers/progress.py [--parts speed stragglers sampling inconsistency] [--quick] [--out FILE.json]

Progress is the number of orders (the paper: iterations) that a silo has finished. Each part is a module beside this
one, and makes a table and a PNG:

- ``speed`` (figures 10-13, 10-14): progress and spread.
- ``stragglers`` (10-15): accuracy of real training after equal virtual time, as a quarter of 16 silos slows down.
- ``sampling`` (10-17): the ways to draw the sample.
- ``inconsistency`` (10-18): the number of changes between a silo's read and its update.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bench.common import write_json
from bench.papers.progress_inconsistency import inconsistency, show_inconsistency
from bench.papers.progress_speed import show_speed, speed
from bench.papers.progress_training import sampling, show_sampling, show_stragglers, stragglers

PARTS = ("speed", "stragglers", "sampling", "inconsistency")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it works")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("bench/results/progress.json"))
    options = parser.parse_args()
    # Parts that are not run keep their results.
    results: dict[str, Any] = json.loads(options.out.read_text()) if options.out.is_file() else {}
    if "speed" in options.parts:
        rows, runs = speed(options.quick, options.processes)
        results["speed"] = {"rows": rows, "runs": runs}
        show_speed(rows, runs, options.out)
    if "stragglers" in options.parts:
        results["stragglers"] = stragglers(options.quick, options.processes)
        show_stragglers(results["stragglers"], options.out)
    if "sampling" in options.parts:
        results["sampling"] = sampling(options.quick, options.processes)
        show_sampling(results["sampling"], options.out)
    if "inconsistency" in options.parts:
        results["inconsistency"] = inconsistency(options.quick, options.processes)
        show_inconsistency(results["inconsistency"], options.out)
    write_json(options.out, results)


if __name__ == "__main__":
    main()
