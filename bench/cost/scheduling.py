"""Cost of scheduling: predicting speeds, planning batch sizes and deciding, for one round, by the number of silos.

    python bench/cost/scheduling.py [--sizes 12 96 ...] [--predictors ema ...] [--quick] [--out FILE.json]

A round of BSP: every silo's update is one call of the coordinator; the last one commits and releases all silos. Silos
have affine curves, speeds from 1 to 3, and steps that vary by 3 %, so that batch sizes and fits never settle. The unit
is processor time of one core; nothing is trained, sent or stored. Parts of a round:

- ``predict``: curves are fitted, speeds are observed and forecast;
- ``plan``: the balancer, with its inputs and outputs;
- ``barrier``: n decisions;
- ``all``: the whole coordinator, which also checks reports, counts, weighs updates and writes orders.

LB-BSP reports 1.1 % of an iteration for 96 workers (section 5.6, figure 14), messages and logs included. The share
here is of an iteration of one second.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np

from bench.common import beside, figure, line, print_table, save, write_json
from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Dispatch
from fedsync.core.coordinator import Coordinator
from fedsync.core.events import Event, SiloJoined, UpdateArrived
from fedsync.core.journal import JournalEntry
from fedsync.core.orders import SiloFacts, UpdateMeta, WorkOrder, WorkReport
from fedsync.core.speed.curve import Curve
from fedsync.core.speed.forecasts import Forecasts
from fedsync.core.speed.sizing import Adaptation, Sizing
from fedsync.policies.barrier.kinds.bulk import Bsp

SIZES = (12, 96, 1_000, 10_000)
BALANCERS: dict[str, dict[str, Any]] = {
    "proportional": {"kind": "proportional"},
    "equalise": {"kind": "equalise"},
    "leader-straggler": {"kind": "leader-straggler", "fast": {"step": 5, "window": 2}},
}
PARTS = ("predict", "plan", "barrier")
STEPS, BATCH = 20, 32
Done = TypeVar("Done")


class Clock:
    """Processor seconds spent in parts of the coordinator, until they are taken."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)

    def around(self, part: str, function: Callable[..., Done]) -> Callable[..., Done]:
        def timed(*args: Any, **kwargs: Any) -> Done:
            began = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.spent[part] += time.process_time() - began

        return timed

    def take(self) -> dict[str, float]:
        spent, self.spent = dict(self.spent), defaultdict(float)
        return spent


class Silos:
    """Answers orders, by curves and with noise."""

    def __init__(self, count: int) -> None:
        self.names = [f"s{index}" for index in range(count)]
        speeds = 100.0 * (1 + 2 * np.arange(count) / max(count - 1, 1))
        self.curves = {
            name: Curve(speed, launch_s=0.1, saturation=8)
            for name, speed in zip(self.names, speeds.tolist(), strict=True)
        }
        self.random = np.random.default_rng(7)

    def join(self) -> list[Event]:
        return [SiloJoined(0.0, name, SiloFacts(10**6)) for name in self.names]

    def answers(self, orders: dict[str, WorkOrder], now_s: float) -> list[UpdateArrived]:
        """All of a round, in the order of their arrival."""
        noise = np.exp(self.random.normal(0.0, 0.03, len(orders))).tolist()
        events = []
        for (name, order), factor in zip(orders.items(), noise, strict=True):
            compute_s = factor * order.max_steps * self.curves[name].step_s(order.batch_size)
            at_s = now_s + compute_s + 0.5
            samples = order.planned_samples
            report = WorkReport(order.base_version, order.max_steps, samples, compute_s, loss=1.0)
            meta = UpdateMeta(
                order.update_id, name, order.base_version, order.max_steps, samples, examples=10**6, nbytes=10**6
            )
            events.append(UpdateArrived(at_s, meta, report))
        return sorted(events, key=lambda event: event.at_s)


def dispatched(entry: JournalEntry) -> dict[str, WorkOrder]:
    return {action.silo: action.order for action in entry.actions if isinstance(action, Dispatch)}


def measure(silos: int, balancer: dict[str, Any], predictor: str, rounds: int) -> dict[str, Any]:
    """Median milliseconds of a round, in parts and as a whole; the first two rounds do not count."""
    config = StrategyConfig.model_validate(
        {
            "name": "scheduling",
            "stop": {"rounds": rounds + 10},
            "min_silos": silos,
            "local": {"steps": STEPS, "batch_size": BATCH},
            "predictor": {"kind": predictor},
            "balancer": balancer,
            "barrier": {"kind": "bsp"},
            "task": {"kind": "digits"},
        }
    )
    clock, machines = Clock(), Silos(silos)
    rows: list[dict[str, float]] = []
    with (
        patch.object(Forecasts, "observe", clock.around("predict", Forecasts.observe)),
        patch.object(Sizing, "plan", clock.around("plan", Sizing.plan)),
        patch.object(Adaptation, "advance", clock.around("plan", Adaptation.advance)),
        patch.object(Bsp, "decide", clock.around("barrier", Bsp.decide)),
    ):
        coordinator = Coordinator(config.policies(silos))
        orders, now_s = dispatched(coordinator.handle(machines.join(), 0.0)), 0.0
        for _ in range(rounds + 2):
            answers = machines.answers(orders, now_s)
            gc.collect()
            clock.take()
            began = time.process_time()
            for event in answers:
                entry = coordinator.handle((event,), event.at_s)
            whole_s = time.process_time() - began
            rows.append({**dict.fromkeys(PARTS, 0.0), **clock.take(), "all": whole_s})
            orders, now_s = dispatched(entry), answers[-1].at_s
    return {part: 1000 * median(row[part] for row in rows[2:]) for part in (*PARTS, "all")}


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    made, (ax,) = figure(width=5.5)
    labels = list(dict.fromkeys((row["balancer"], row["predictor"]) for row in rows))
    for index, label in enumerate(labels):
        mine = [row for row in rows if (row["balancer"], row["predictor"]) == label]
        ax.plot([r["silos"] for r in mine], [r["scheduling_ms"] for r in mine], **line(index), label=", ".join(label))
    ax.axhline(10.0, color="black", linewidth=0.8, linestyle="--", label="1 % of a second")
    ax.set(xscale="log", yscale="log", xlabel="silos", ylabel="predict + plan + barrier [ms a round]")
    ax.legend(fontsize=7, frameon=False)
    save(made, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--balancers", nargs="+", default=list(BALANCERS))
    parser.add_argument("--predictors", nargs="+", default=["ema"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="96 silos, five rounds: to see that it works")
    parser.add_argument("--processes", type=int, default=1, help="not used: runs beside each other would disturb")
    parser.add_argument("--out", type=Path, default=Path("bench/results/scheduling.json"))
    options = parser.parse_args()
    if options.quick:
        options.sizes, options.rounds = [12, 96], 5
    rows: list[dict[str, Any]] = []
    for silos in options.sizes:
        for predictor in options.predictors:
            for name in options.balancers:
                row = {"silos": silos, "predictor": predictor, "balancer": name}
                row |= measure(silos, BALANCERS[name], predictor, options.rounds)
                row["scheduling_ms"] = sum(row[part] for part in PARTS)
                rows.append(row)
    print_table(
        f"Milliseconds a round, median of {options.rounds}; share of an iteration of 1 s",
        ["balancer", "predictor", "silos", *PARTS, "together", "share", "a silo [us]", "all"],
        [
            [
                row["balancer"],
                row["predictor"],
                f"{row['silos']:,}",
                *(f"{row[part]:.2f}" for part in PARTS),
                f"{row['scheduling_ms']:.2f}",
                f"{row['scheduling_ms'] / 10:.2f}%",
                f"{1000 * row['scheduling_ms'] / row['silos']:.1f}",
                f"{row['all']:.2f}",
            ]
            for row in rows
        ],
    )
    write_json(options.out, rows)
    draw(rows, beside(options.out))


if __name__ == "__main__":
    main()
