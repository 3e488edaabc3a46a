"""The report of a long run with many silos: bytes of the page, seconds to build it and to load it in a browser.

A virtual run trains in the shortest possible rounds, and its report is built as by `fedsync report`. If Chromium or
Chrome is installed, a fresh page loads the file several times. Loading is timed from the start of the
navigation until everything is laid out and painted.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

from bench.browser import Browser, find
from bench.common import print_table, write_json
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.extras.report.data import read_runs
from fedsync.extras.report.report_page import page
from fedsync.simulation.run import run_virtual


def trained(silos: int, rounds: int, out: Path) -> None:
    """A run whose silos' speeds spread 1:3."""
    machines = [{"name": f"hospital-{at + 1:02d}", "speed": 100 + 200 * at / silos} for at in range(silos)]
    short = [f"stop.rounds={rounds}", "local.steps=2", "local.batch_size=16"]
    run_virtual(StrategyConfig.load("lb-bsp", short), ClusterConfig.model_validate({"silos": machines}), out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--silos", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--turns", type=int, default=5, help="times that the page is loaded")
    parser.add_argument("--out", type=Path, default=Path("bench/results/report.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as above:
        folder = Path(above) / "run"
        trained(options.silos, options.rounds, folder)
        begin_s = time.perf_counter()
        (folder / "report.html").write_text(page(read_runs([folder])), encoding="utf-8")
        build_s = time.perf_counter() - begin_s
        size = (folder / "report.html").stat().st_size
        program, load_s = find(), []
        if program is not None:
            with Browser(program) as browser:
                load_s = [browser.load(folder / "report.html") for _ in range(options.turns)]
    loaded = f"{median(load_s):.2f} (most {max(load_s):.2f})" if load_s else "no browser"
    row = [f"{options.silos} silos, {options.rounds} rounds", f"{size / 1e6:.2f}", f"{build_s:.1f}", loaded]
    print_table("The report of one run", ["run", "page MB", "build s", "browser loads it in s"], [row])
    figures = {"silos": options.silos, "rounds": options.rounds, "bytes": size, "build_s": build_s, "load_s": load_s}
    write_json(options.out, figures)


if __name__ == "__main__":
    main()
