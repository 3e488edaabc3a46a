"""Effect of one silo's slow connection on the others, over the hub and over Flower's messages.

A real federation, with TLS, node authentication and encryption, trains a model of a million parameters without a
barrier (ASP). The first silo's outgoing connection has a limited bandwidth. Flower announces an answer before
its parts have arrived, and its call that pulls answers returns when all parts of all answers are there. The figure is
the number of updates of each silo.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.common import markdown_table, print_table, write_json
from bench.faults.soak_federation import OWN_APP, Federation, bundled
from fedsync.common.errors import RunError
from fedsync.config.strategy import StrategyConfig
from fedsync.core.events import UpdateArrived
from fedsync.core.journal import JOURNAL, read_journal
from fedsync.ops.runs import submit_run
from fedsync.server.run_folder import DONE_FILE, ERROR_FILE

WAYS = {"Flower's messages": "bench.cost.no_hub:app", "hub": OWN_APP}
COLUMNS = ("answers come", "updates of the slow line", "updates of each other silo", "ratio")


@dataclass(frozen=True, slots=True)
class Row:
    """Updates that arrived in a run.

    Args:
        way: of fetching answers.
        slow: of the silo behind the slow line.
        others: of each other silo, on average.
    """

    way: str
    slow: int
    others: float


def run(federation: Federation, way: str, seconds: float) -> Row:
    """One run, so many seconds from the moment all silos are there."""
    settings = [
        "cipher={kind: pad}",
        "task={kind: mlp, data: {kind: digits28}, hidden: [1000, 200]}",
        "local={steps: 1, batch_size: 8, threads: 1}",
        f"stop={{rounds: 1000000, seconds: {seconds}}}",
        f"min_silos={len(federation.names)}",
    ]
    config = StrategyConfig.load("asp", settings)
    with bundled(OWN_APP, WAYS[way]):
        out = submit_run(federation.config, config)
    while not (out / DONE_FILE).exists():
        if (out / ERROR_FILE).exists():
            raise RunError((out / ERROR_FILE).read_text())
        time.sleep(0.5)
    events = [event for entry in read_journal(out / JOURNAL)[1] for event in entry.events]
    updates = Counter(event.meta.silo for event in events if isinstance(event, UpdateArrived))
    others = [updates[name] for name in federation.names[1:]]
    return Row(way, updates[federation.names[0]], sum(others) / len(others))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--silos", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=120.0, help="of each run")
    parser.add_argument("--line", type=float, default=400_000.0, help="of the first silo [bytes/s]")
    parser.add_argument("--out", type=Path, default=Path("bench/results/slow_line.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="slow-line-") as folder:
        federation = Federation(
            Path(folder), options.silos, options.line, code="shipped"
        )  # else only a hub is answered
        federation.start()
        try:
            rows = [run(federation, way, options.seconds) for way in WAYS]
        finally:
            federation.stop()
    if not rows[0].others:
        raise SystemExit(f"no other silo came to an update in {options.seconds:g} s: give it more --seconds")
    cells = [[row.way, row.slow, f"{row.others:.1f}", f"{row.others / rows[0].others:.1f}"] for row in rows]
    print_table(f"{options.silos} silos, {options.seconds:g} s, a line of {options.line:g} bytes/s", COLUMNS, cells)
    print(markdown_table(COLUMNS, cells))
    write_json(options.out, [asdict(row) for row in rows])


if __name__ == "__main__":
    main()
