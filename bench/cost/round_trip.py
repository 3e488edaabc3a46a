"""Latency of an empty order from the server to a resident silo and back, over the hub and over Flower's messages.

Both are the `local` runtime: a SuperLink, one SuperNode a silo, TLS and node authentication. Flower starts a process
for every message and polls for messages every 3 s. Over the hub an agent receives its next order at once.
The order is one local step on one sample and the evaluation of the model. The first orders, in which the trainers
start, do not count. The way there and back is an order's time without the step and the evaluation, as its silo
reports them. It contains the disk: an answer leaves when it is on the silo's disk.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter

from bench.common import print_table, write_json
from bench.faults.soak_federation import OWN_APP, bundled
from fedsync.common.files import OWNER_FILE, write_atomically
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Dispatch
from fedsync.core.events import UpdateArrived
from fedsync.core.journal import JOURNAL, read_journal
from fedsync.ops.local import run_local

WARM_UP = 2
QUICK = ["task={kind: digits}", "local.steps=1", "local.batch_size=1"]


Order = tuple[float, float]
"""Seconds of an order, and those of its step and evaluation."""


def round_trips(silos: int, rounds: int, *, stock: bool) -> list[Order]:
    """Each order after the first ones."""
    machines = [{"name": f"silo-{index}", "speed": 1e6} for index in range(silos)]
    config = StrategyConfig.load("fedavg", [*QUICK, f"stop.rounds={rounds + WARM_UP}"])
    app = "bench.cost.no_hub:app" if stock else OWN_APP
    with tempfile.TemporaryDirectory(prefix="round-trip-") as folder, bundled(OWN_APP, app):
        run_local(config, ClusterConfig.model_validate({"silos": machines}), Path(folder))
        return _orders(Path(folder) / JOURNAL)


def _orders(journal: Path) -> list[Order]:
    began: dict[str, tuple[float, int]] = {}
    orders = []
    for entry in read_journal(journal)[1]:
        for event in entry.events:
            if isinstance(event, UpdateArrived):
                at_s, serial = began[event.meta.update_id]
                if serial > WARM_UP:
                    work_s = event.report.compute_s + sum(event.report.overhead_s.values())
                    orders.append((event.at_s - at_s, work_s))
        for action in entry.actions:
            if isinstance(action, Dispatch):
                began[action.order.update_id] = entry.at_s, action.order.round
    return orders


def settle_s(folder: Path, size: int = 40_000, times: int = 50) -> float:
    """Median seconds until a new file of ``size`` bytes, about an answer's, and its name are on disk."""
    taken = []
    for _ in range(times):
        began_s = perf_counter()
        write_atomically(folder / "answer.bin", bytes(size), OWNER_FILE)
        taken.append(perf_counter() - began_s)
    return median(taken)


def _row(name: str, orders: Sequence[Order], base: float) -> list[object]:
    times = [time_s for time_s, _ in orders]
    tenths = quantiles(times, n=10)
    figures = [median(times), tenths[0], tenths[-1], median(time_s - work_s for time_s, work_s in orders)]
    return [name, len(times), *(f"{each:.3f}" for each in figures), f"{base:.1f} x"]


def main() -> None:
    """Measure both and print them side by side."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--silos", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--stock-rounds", type=int, default=10, help="0: only the hub")
    parser.add_argument("--out", type=Path, default=Path("bench/results/round_trip.json"))
    options = parser.parse_args()
    fast = round_trips(options.silos, options.rounds, stock=False)
    rows = [_row("hub", fast, 1.0)]
    found: dict[str, object] = {"fast_s": fast}
    if options.stock_rounds:
        stock = round_trips(options.silos, options.stock_rounds, stock=True)
        ratio = median(time_s for time_s, _ in stock) / median(time_s for time_s, _ in fast)
        rows = [_row("Flower's messages", stock, 1.0), _row("hub", fast, ratio)]
        found |= {"stock_s": stock, "ratio": ratio}
    print_table(
        f"seconds of an empty order, {options.silos} silo(s)",
        ("by", "orders", "median", "10 %", "90 %", "there and back", "speed"),
        rows,
    )
    with tempfile.TemporaryDirectory(prefix="round-trip-") as folder:
        found["disk_s"] = disk_s = settle_s(Path(folder))
    print(f"the disk takes {disk_s:.4f} s until an answer's file is on it (median of 50)")
    write_json(options.out, found)


if __name__ == "__main__":
    main()
