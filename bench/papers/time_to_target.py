"""Virtual seconds to a target accuracy, with real training, of strategies as shipped.

    python bench/papers/time_to_target.py [--seeds 3] [--target 0.9] [--details] [--quick] [--markdown]

Every unencrypted strategy, on digits, two classes a silo, on three clusters, without overhead. With eight silos, digits
0 to 5 are shared by two silos each and 6 to 9 are held by one silo each, so a model without one of these silos misses
the target. ``--strategies`` names any, ``--set`` changes a value in all of them. ``map.py`` compares tuned strategies.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from bench.common import write_json
from bench.papers import target_untuned


def measure(options: argparse.Namespace) -> None:
    """The strategies as they are."""
    options.clusters = options.clusters or list(target_untuned.CLUSTERS)
    options.strategies = options.strategies or target_untuned.strategies()
    if options.quick:
        options.seeds, options.target = 1, min(options.target, 0.6)
    began = time.perf_counter()
    rows = target_untuned.measure(options)
    write_json(options.out, {"target": options.target, "wall_s": time.perf_counter() - began, "runs": rows})
    target_untuned.show(rows, options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--clusters", nargs="+", help="by default those that the tables have")
    parser.add_argument("--strategies", nargs="+", help="by default all that are plain")
    parser.add_argument("--quick", action="store_true", help="few seeds, low targets: to see that it works")
    parser.add_argument("--processes", "--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("bench/results/time_to_target.json"), help="picture beside it")
    parser.add_argument("--markdown", action="store_true", help="the tables once more, for a page")
    parser.add_argument("--target", type=float, default=0.9)
    parser.add_argument("--longest", type=float, default=400.0, help="virtual seconds that FedAvg may take")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="in all strategies")
    parser.add_argument("--details", action="store_true", help="a second table: seconds, utilisation and waiting")
    options = parser.parse_args()
    began = time.perf_counter()
    measure(options)
    print(f"{time.perf_counter() - began:.0f} s of real time")


if __name__ == "__main__":
    main()
