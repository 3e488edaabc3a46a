"""What relays spare a server: processor time an order, with relays and without, in the clear and sealed.

The server is a real one, `fedsync server start`. Silos, and relays with their silos, are the load generator's
(`bench/cost/crowd_silos.py`, `bench/cost/relay_silos.py`), in which nothing is trained. All silos work in rounds (BSP).
An order's work is the processor time of SuperLink and ServerApp from the first commit to the last, by the updates that
were committed meanwhile. So what nodes cost that wait is in it, too, and what the ServerApp's looks cost: both grow
with the seconds, which are mostly the generator's.

    python bench/cost/relay.py [--silos 100 --region 10] [--rounds 10] [--plain] [--sealed]
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import asdict
from pathlib import Path

from bench.common import print_table, write_json
from bench.cost.crowd import WARM_UP, Sample, Server
from fedsync.config.strategy import StrategyConfig
from fedsync.ops.runs import submit_run

_RELAYS = "from bench.cost.relay_silos import main; main()"


def measured(options: argparse.Namespace, folder: Path, *, sealed: bool, region: int) -> list[Sample]:
    """How the server was, second by second; ``region`` 0 is without relays."""
    names = [f"silo-{index}" for index in range(options.silos)]
    regions = None
    if region:
        regions = {f"relay-{first // region}": names[first : first + region] for first in range(0, len(names), region)}
    server = Server(folder, options.silos, sealed=sealed, regions=regions)
    samples: list[Sample] = []
    try:
        server.until("registration", lambda: server.registered(len(regions or names)))
        if region:
            server.crowd(options.silos, "--region", str(region), program=_RELAYS)
        else:
            server.crowd(options.silos)
        settings = ["task={kind: digits}", f"min_silos={options.silos}", "local.steps=1", "local.batch_size=8"]
        settings += [f"stop.rounds={options.rounds}", *(["cipher={kind: bfv, bits: 16}"] if sealed else [])]
        submit_run(server.config, StrategyConfig.load("fedavg", settings), server.out)
        while not samples or samples[-1].commits < options.rounds:
            server.until("another look", iter((False, True)).__next__)
            samples.append(server.sample())
            if options.verbose:
                print(samples[-1], flush=True)
    finally:
        server.end()
    return samples


def of_an_order(samples: list[Sample]) -> tuple[float, float]:
    """Processor time of SuperLink and ServerApp for an update [ms]."""
    first, last = next(each for each in samples if each.commits >= WARM_UP), samples[-1]
    updates = max(1, last.updates - first.updates)
    return 1e3 * (last.superlink_s - first.superlink_s) / updates, 1e3 * (last.app_s - first.app_s) / updates


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
            link_ms, app_ms = of_an_order(samples)
            work[region] = link_ms + app_ms
            found[f"{kind} {region}"] = [asdict(each) for each in samples]
            ratio = f"{work[0] / work[region]:.1f}" if region else ""
            relays = f"{options.region} a relay" if region else "none"
            first_s = next(each for each in samples if each.commits >= WARM_UP).at_s
            figures = (link_ms, app_ms, work[region], samples[-1].at_s - first_s)
            rows.append((kind, relays, *(f"{figure:.2f}" for figure in figures), ratio))
    print_table(
        f"{options.silos} silos, {options.rounds} rounds, 10,026 parameters; {os.cpu_count()} processors, "
        f"load {load:.1f} to {os.getloadavg()[0]:.1f}",
        ("updates", "relays", "SuperLink an order [ms]", "ServerApp [ms]", "both [ms]", "seconds", "falls by"),
        rows,
    )
    found["load"] = load
    write_json(options.out, found)


if __name__ == "__main__":
    main()
