"""Events per second of the virtual clock in timing-only mode, from 100 to 100,000 silos, on one core.

An event is an order to a silo or an answer from a silo, so each order counts two. The measurement starts after the
first orders, stops with the last commit but one, and contains all that a run does: heap, coordinator, policies,
accounts. The unit is processor time, and the journal is off.

Speeds spread 1:3, so that no two silos finish together; memoryless forecasts, no balancer. Rows:

- ``bsp``: every silo waits for all; every arrival is one call of the coordinator, every round releases all silos.
- ``each``: every arrival is committed alone, and its silo continues at once. This barrier is the smallest possible and
  not a shipped one, so the row shows the engine with an asynchronous barrier that costs nothing.
- ``asp``: as shipped.
- ``ssp``: with a bound of 4. It looks at changes, and at every silo only when the slowest has advanced.
- ``pbsp``: `sampled` with a sample of 4, where every waiting silo looks at other silos at each arrival.
- ``asp, poll``: the coordinator is called at multiples of a time in which about a tenth of all silos finish.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich import box
from rich.console import Console
from rich.table import Table

from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.state import Policies
from fedsync.core.views import ClusterView, Verdict
from fedsync.observe.ledger import Ledger
from fedsync.simulation.timing_only import run_timing

SIZES = (100, 1_000, 10_000, 100_000)
STEPS, BATCH, SLOWEST = 20, 32, 100.0
ORDER_S = STEPS * BATCH / (2 * SLOWEST)
"""Seconds of an order at the middle speed."""


@dataclass(frozen=True)
class Row:
    barrier: str
    silos: int
    events: int
    cpu_s: float
    events_per_s: float


@dataclass(frozen=True)
class Each:
    """Commit each update, release whoever is idle: `Asp` without clocks."""

    def init(self) -> None:
        return None

    def decide(self, state: None, view: ClusterView) -> tuple[None, Verdict]:
        if view.pending:
            return None, Verdict(commit=(next(iter(view.pending)),), reason="an update is in")
        return None, Verdict(release=view.idle, reason="goes on")


class Meter:
    """Processor time from the first orders to commit number ``last``."""

    def __init__(self, last: int) -> None:
        self.last = last
        self.begin_s: float | None = None
        self.end_s: float | None = None

    def follow(self, ledger: Ledger) -> None:
        if self.begin_s is None:
            self.begin_s = time.process_time()
        elif self.end_s is None and len(ledger.rounds) >= self.last:
            self.end_s = time.process_time()

    @property
    def cpu_s(self) -> float:
        assert self.begin_s is not None and self.end_s is not None
        return self.end_s - self.begin_s


def cluster(silos: int) -> ClusterConfig:
    speeds = [SLOWEST * (1 + 2 * index / max(silos - 1, 1)) for index in range(silos)]
    return ClusterConfig.model_validate({"silos": [{"name": f"s{i}", "speed": s} for i, s in enumerate(speeds)]})


def config(barrier: dict[str, Any], commits: int) -> StrategyConfig:
    plain = {
        "name": "engine",
        "stop": {"rounds": commits},
        "local": {"steps": STEPS, "batch_size": BATCH},
        "predictor": {"kind": "memoryless"},
        "balancer": {"kind": "fixed"},
        "barrier": barrier,
        "task": {"kind": "digits"},
    }
    return StrategyConfig.model_validate(plain)


def measure(name: str, barrier: dict[str, Any], machines: ClusterConfig, events: int, poll_s: float = 0.0) -> Row:
    """Run for about ``events`` events."""
    silos = len(machines.silos)
    a_commit = 2 * silos if barrier["kind"] == "bsp" else 2
    commits = max(events // a_commit, 2)
    meter, strategy = Meter(commits), config(barrier, commits + 1)
    gc.collect()
    with tempfile.TemporaryDirectory() as folder:
        run_timing(strategy, machines, Path(folder), listeners=[meter], journal=False, poll_s=poll_s)
    done = commits * a_commit
    return Row(name, silos, done, meter.cpu_s, done / meter.cpu_s)


def with_each(machines: ClusterConfig, events: int) -> Row:
    """`measure` with `Each` in place of the strategy's barrier: a kind that is not registered cannot be configured."""
    configured = StrategyConfig.policies

    def policies(self: StrategyConfig, silos: int | None = None) -> Policies:
        return replace(configured(self, silos), barrier=Each())

    with patch.object(StrategyConfig, "policies", policies):
        return measure("each", {"kind": "asp"}, machines, events)


def few(silos: int, events: int) -> int:
    """So many events of a barrier that looks at every waiting silo each time as take a few seconds."""
    return min(events, 5_000_000 // silos)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench/results/engine.json"))
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--events", type=int, default=100_000)
    options = parser.parse_args()

    rows: list[Row] = []
    for silos in options.sizes:
        events, machines = max(options.events, 2 * silos), cluster(silos)
        rows.append(measure("bsp", {"kind": "bsp"}, machines, events))
        rows.append(with_each(machines, events))
        rows.append(measure("asp", {"kind": "asp"}, machines, events))
        rows.append(measure("ssp", {"kind": "ssp", "staleness": 4}, machines, events))
        rows.append(measure("pbsp", {"kind": "sampled", "sample_size": 4}, machines, few(silos, events)))
        rows.append(measure("asp, poll", {"kind": "asp"}, machines, events, poll_s=ORDER_S / 10))

    barriers = list(dict.fromkeys(row.barrier for row in rows))
    table = Table(title=f"Events/s, timing only, Python {platform.python_version()}, one core", box=box.SIMPLE_HEAD)
    table.add_column("silos", justify="right")
    for barrier in barriers:
        table.add_column(barrier, justify="right")
    for silos in options.sizes:
        speeds = [row.events_per_s for row in rows if row.silos == silos]
        table.add_row(f"{silos:,}", *(f"{speed:,.0f}" for speed in speeds))
    Console(width=100).print(table)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
