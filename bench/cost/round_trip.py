"""Latency of an empty order from the server to a resident silo and back, over the hub and over Flower's messages.

Both are the `local` runtime: a SuperLink, one SuperNode a silo, TLS and node authentication. Flower starts a process
for every message and polls for messages every 3 s. Over the hub an agent receives its next order at once.
The order is one local step on one sample, so the figure is the way there and back. The first orders, in which
the trainers start, do not count.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles

from bench.common import print_table, write_json
from bench.faults.soak_federation import OWN_APP, bundled
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Dispatch
from fedsync.core.events import UpdateArrived
from fedsync.core.journal import JOURNAL, read_journal
from fedsync.ops.local import run_local

WARM_UP = 2
QUICK = ["task={kind: digits}", "local.steps=1", "local.batch_size=1"]


def round_trips(silos: int, rounds: int, *, stock: bool) -> list[float]:
    """Seconds of each order after the first ones."""
    machines = [{"name": f"silo-{index}", "speed": 1e6} for index in range(silos)]
    config = StrategyConfig.load("fedavg", [*QUICK, f"stop.rounds={rounds + WARM_UP}"])
    app = "bench.cost.no_hub:app" if stock else OWN_APP
    with tempfile.TemporaryDirectory(prefix="round-trip-") as folder, bundled(OWN_APP, app):
        run_local(config, ClusterConfig.model_validate({"silos": machines}), Path(folder))
        return _times(Path(folder) / JOURNAL)


def _times(journal: Path) -> list[float]:
    began: dict[str, tuple[float, int]] = {}
    times = []
    for entry in read_journal(journal)[1]:
        for event in entry.events:
            if isinstance(event, UpdateArrived):
                at_s, serial = began[event.meta.update_id]
                if serial > WARM_UP:
                    times.append(event.at_s - at_s)
        for action in entry.actions:
            if isinstance(action, Dispatch):
                began[action.order.update_id] = entry.at_s, action.order.round
    return times


def _row(name: str, times: Sequence[float], base: float) -> list[object]:
    tenths = quantiles(times, n=10)
    return [name, len(times), f"{median(times):.2f}", f"{tenths[0]:.2f}", f"{tenths[-1]:.2f}", f"{base:.1f} x"]


def main() -> None:
    """Measure both and print them side by side."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--silos", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--stock-rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("bench/results/round_trip.json"))
    options = parser.parse_args()
    fast = round_trips(options.silos, options.rounds, stock=False)
    stock = round_trips(options.silos, options.stock_rounds, stock=True)
    ratio = median(stock) / median(fast)
    print_table(
        f"seconds of the round trip of an empty order, {options.silos} silo(s)",
        ("way", "orders", "median", "10 %", "90 %", "speed"),
        [_row("Flower's messages", stock, 1.0), _row("hub", fast, ratio)],
    )
    write_json(options.out, {"fast_s": fast, "stock_s": stock, "ratio": ratio})


if __name__ == "__main__":
    main()
