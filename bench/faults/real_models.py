"""Every shipped strategy on real Flower processes, one after the other: does it end well?

    python bench/faults/real_models.py [--rounds 6] [--strategies NAME ...] [--out FILE.json]

A SuperLink and a SuperNode a silo for each run (``--runtime local``); three silos whose emulated speeds are as 4 to 2
to 1, and digits, partitioned by the strategy. A strategy ends well if it commits its rounds, at most one silo
contributes nothing, no order fails, and its journal replays to the same decisions. The rounds are too few to compare
models: see ``time_to_target.py``.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.common import print_table, write_json
from fedsync import replay
from fedsync.cli import Runtime, runner
from fedsync.common.errors import FedSyncError
from fedsync.config.cluster import ClusterConfig
from fedsync.config.locate import locate
from fedsync.config.strategy import StrategyConfig

SPEEDS = {"clinic-a": 2000.0, "clinic-b": 1000.0, "clinic-c": 500.0}
LIMIT_S = 90.0
"""Training seconds after which a run is stopped; reaching it is not ending well."""


def strategies() -> list[str]:
    """Names of all shipped ones."""
    return sorted(path.stem for path in locate("fedavg").parent.glob("*.yaml"))


def one_run(name: str, rounds: int) -> dict[str, Any]:
    """A row of the table."""
    config = StrategyConfig.load(name, [f"stop={{rounds: {rounds}, seconds: {LIMIT_S}}}"])
    cluster = ClusterConfig.model_validate({"silos": [{"name": silo, "speed": v} for silo, v in SPEEDS.items()]})
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            summary = runner(Runtime.LOCAL)(config, cluster, Path(folder))
            replay(Path(folder) / "journal.jsonl")
        except FedSyncError as error:
            return {"strategy": name, "fault": f"{type(error).__name__}: {error}"}
    kept = ("rounds", "seconds", "accuracy", "wait_fraction", "utilisation", "stopped_by")
    row = {"strategy": name, "wall_s": time.perf_counter() - began, **{key: summary[key] for key in kept}}
    row["orders"] = [silo["orders"] for silo in summary["silos"]]
    row["failures"] = sum(silo["failures"] for silo in summary["silos"])
    return row | {"fault": fault(row, rounds)}


def fault(row: dict[str, Any], rounds: int) -> str | None:
    """What is wrong with a run, or None."""
    if row["rounds"] != rounds:
        return f"{row['rounds']} of {rounds} rounds, stopped by: {row['stopped_by']}"
    if row["failures"]:
        return f"{row['failures']} orders failed"
    # Before the slowest has sent its first update, a barrier that waits for nobody may commit six of the others'.
    idle = sum(orders == 0 for orders in row["orders"])
    return f"{idle} silos without a finished order" if idle > 1 else None


def show(rows: list[dict[str, Any]]) -> None:
    print_table(
        "Shipped strategies on real Flower processes",
        ("strategy", "rounds", "seconds", "orders", "waiting", "accuracy", "all [s]", "ends well"),
        [
            (row["strategy"], *("-",) * 6, row["fault"])
            if "rounds" not in row
            else (
                row["strategy"],
                str(row["rounds"]),
                f"{row['seconds']:.1f}",
                " ".join(map(str, row["orders"])),
                f"{max(row['wait_fraction'], 0.0):.0%}",
                "-" if row["accuracy"] is None else f"{row['accuracy']:.2f}",
                f"{row['wall_s']:.0f}",
                row["fault"] or "yes",
            )
            for row in rows
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--strategies", nargs="+", default=strategies())
    parser.add_argument("--quick", action="store_true", help="one strategy, two rounds: to see that it works")
    parser.add_argument("--out", type=Path, default=Path("bench/results/real_models.json"))
    options = parser.parse_args()
    if options.quick:
        options.strategies, options.rounds = options.strategies[:1], 2
    rows = []
    for name in options.strategies:
        rows.append(one_run(name, options.rounds))
        print(f"{name}: {rows[-1]['fault'] or 'ends well'}", flush=True)
    write_json(options.out, {"speeds": SPEEDS, "runs": rows})
    show(rows)
    if any(row["fault"] is not None for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
