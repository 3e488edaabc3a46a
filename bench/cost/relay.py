"""Server work that relays save: processor time per order, with relays and without, in the clear and encrypted.

The server is that of `bench/cost/crowd.py`, a ServerApp with its hub. The load generator (`bench/cost/crowd_silos.py`)
plays silos, and relays with their silos, and trains nothing. All silos work in rounds (BSP). Work per order is the
processor time of the ServerApp from the first commit to the last, divided by the updates committed meanwhile.
So it contains the cost of waiting silos, which grows with the seconds. Most of these seconds are the generator's.

    python bench/cost/relay.py [--silos 100 --region 10] [--rounds 10] [--plain] [--sealed]
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import asdict
from pathlib import Path

from bench.common import print_table, write_json
from bench.cost.crowd import WARM_UP, Sample, Server, of_an_order
from fedsync.config.strategy import StrategyConfig


def measured(options: argparse.Namespace, folder: Path, *, sealed: bool, region: int) -> list[Sample]:
    """Looks at the server, one after the other; ``region`` 0 is without relays."""
    names = [f"silo-{index}" for index in range(options.silos)]
    parts = range(0, len(names), region) if region else ()
    regions = {f"relay-{first // region}": names[first : first + region] for first in parts}
    settings = ["task={kind: digits}", f"min_silos={options.silos}", "local.steps=1", "local.batch_size=8"]
    settings += [f"stop.rounds={options.rounds}", *(["cipher={kind: bfv, bits: 16}"] if sealed else [])]
    server = Server(folder, options.silos, StrategyConfig.load("fedavg", settings), regions or None)
    try:
        server.start("--region", str(region))
        return server.samples(options.rounds, print if options.verbose else id)
    finally:
        server.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--silos", type=int, default=100)
    parser.add_argument("--region", type=int, default=10, help="silos of a relay")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--plain", action="store_true", help="in the clear only")
    parser.add_argument("--sealed", action="store_true", help="sealed only")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("bench/results/relay.json"))
    options = parser.parse_args()
    kinds = [kind for kind in ("plain", "sealed") if getattr(options, kind)] or ["plain", "sealed"]
    load, found, rows = os.getloadavg()[0], dict[str, object](), []
    for kind in kinds:
        work: dict[int, float] = {}
        for region in (0, options.region):
            with tempfile.TemporaryDirectory(prefix="relay-") as name:
                samples = measured(options, Path(name), sealed=kind == "sealed", region=region)
            work[region] = of_an_order(samples)[0]
            found[f"{kind} {region}"] = [asdict(each) for each in samples]
            ratio = f"{work[0] / work[region]:.1f}" if region and work[region] else ""
            relays = f"{options.region} a relay" if region else "none"
            first_s = next(each for each in samples if each.commits >= WARM_UP).at_s
            figures = (work[region], samples[-1].at_s - first_s)
            rows.append((kind, relays, *(f"{figure:.2f}" for figure in figures), ratio))
    print_table(
        f"{options.silos} silos, {options.rounds} rounds, 10,026 parameters; {os.cpu_count()} processors, "
        f"load {load:.1f} to {os.getloadavg()[0]:.1f}",
        ("updates", "relays", "ServerApp an order [ms]", "seconds", "falls by"),
        rows,
    )
    found["load"] = load
    write_json(options.out, found)


if __name__ == "__main__":
    main()
