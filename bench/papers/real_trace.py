"""A real trace: the training loop of this machine while another process comes and goes, and each predictor's error.

Orders of the digits task, a few steps each, are trained one after the other; the row of an order is its speed and the
probe's readings meanwhile. A process keeps ``--load`` processors busy and some memory in use, for exponentially
distributed times, then rests as long. Prints the table of `predictors.py` for this one trace.

    python bench/papers/real_trace.py [--seconds 120] [--trace bench/results/real_trace.csv]
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import os
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress

from bench.common import print_table, write_json
from bench.papers.backtest import Step, backtest
from fedsync.core.orders import Cursor, WorkOrder
from fedsync.policies.predict.predictor_base import predictors
from fedsync.tasks.digits import DigitsTask
from fedsync.tasks.partition import Iid
from fedsync.tasks.task_protocol import SiloSlot
from fedsync.train.loop import Trainer
from fedsync.train.options import LocalOptions

STEPS, BATCH = 4, 32


def disturb(seed: int, mean_s: float) -> None:
    """Busy and idle in turn until the parent ends it."""
    draw = np.random.default_rng(seed)
    while True:
        end_s = time.monotonic() + draw.exponential(mean_s)
        held = np.ones(int(draw.uniform(0, 5e7)))
        while time.monotonic() < end_s:
            held[:100_000].sum()
        del held
        time.sleep(draw.exponential(mean_s))


def record(seconds: float) -> list[Step]:
    trainer = Trainer(DigitsTask(Iid()), SiloSlot("silo-0", 0, 5, 7), LocalOptions(threads=1))
    base, cursor, steps = trainer.initial_model(), Cursor(), []
    start_s = time.monotonic()
    with Progress(console=Console(stderr=True), transient=True) as bar:
        line = bar.add_task("training", total=seconds)
        while time.monotonic() - start_s < seconds:
            order = WorkOrder(f"a/{len(steps)}", 0, len(steps) + 1, BATCH, STEPS, 0.1, len(steps), evaluate=False)
            done = trainer.run(order, base, cursor)
            report, cursor = done.report, done.cursor
            cpu = np.mean([window.cpu or 0.0 for window in report.windows])
            memory = np.mean([window.memory or 0.0 for window in report.windows])
            steps.append(Step(report.samples / report.compute_s, min(float(cpu), 1.0), min(float(memory), 1.0)))
            bar.update(line, completed=time.monotonic() - start_s)
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench/results/real_trace.json"))
    parser.add_argument("--trace", type=Path, default=Path("bench/results/real_trace.csv"))
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--mean", type=float, default=3.0, help="mean seconds that the other process is busy, or idle")
    parser.add_argument("--load", type=int, default=os.cpu_count(), help="processors that it keeps busy")
    parser.add_argument("--warmup", type=int, default=500)
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    others = [spawn.Process(target=disturb, args=(seed, options.mean), daemon=True) for seed in range(options.load)]
    for other in others:
        other.start()
    try:
        steps = record(options.seconds)
    finally:
        for other in others:
            other.terminate()
    options.trace.parent.mkdir(parents=True, exist_ok=True)
    with options.trace.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "speed", "cpu", "memory"])
        writer.writerows([index, step.speed, step.cpu, step.memory] for index, step in enumerate(steps))
    if len(steps) <= options.warmup:
        raise SystemExit(
            f"{len(steps)} orders in {options.seconds:g} s, of which {options.warmup} are warm-up: take longer"
        )
    scores = {kind: backtest(known, steps, options.warmup) for kind, known in predictors().items()}
    ema = scores["ema"].rmse
    rows = [[kind, f"{s.rmse:.1f}", f"{s.mae:.1f}", f"{s.rmse / ema:.3f}"] for kind, s in scores.items()]
    speeds = np.array([step.speed for step in steps])
    title = f"{len(steps)} orders of {STEPS} x {BATCH} samples, {speeds.mean():.0f} +- {speeds.std():.0f} samples/s"
    print_table(title, ["predictor", "RMSE", "MAE", "RMSE / EMA's"], rows)
    write_json(options.out, {kind: {"rmse": score.rmse, "mae": score.mae} for kind, score in scores.items()})


if __name__ == "__main__":
    main()
