"""Like table 3 of LB-BSP: every predictor's error on contention traces, and LB-BSP's iteration time with it.

Six machines, one seed each, of `bench.papers.contention`, which describes their load. Each predictor
forecasts each machine's speed one step ahead, with the step's processors and memory known. RMSE counts after the
warm-up.

Iteration time: the six machines are a cluster. In every step after the warm-up LB-BSP (Algorithm 1) shares 6 x 64
samples by the forecasts, and the step takes as long as the slowest machine; under BSP each has 64. "oracle" shares by
the true speeds, which no predictor knows.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import in_parallel, print_table, write_json
from bench.papers.backtest import BacktestErrors, Step, backtest
from bench.papers.contention import Contention, contention_trace
from fedsync.core.protocols import Bounds
from fedsync.core.speed.curve import Curve
from fedsync.policies.balance.by_forecast import ProportionalBalancer
from fedsync.policies.predict.predictor_base import predictors

BATCH = 64


def steps_of(seed: int, count: int) -> list[Step]:
    trace = contention_trace(Contention(), count, seed)
    columns = (trace.speed.tolist(), trace.cpu.tolist(), trace.memory.tolist())
    return [Step(*row) for row in zip(*columns, strict=True)]


def one(job: tuple[str, int, int, int]) -> BacktestErrors:
    kind, seed, count, warmup = job
    return backtest(predictors()[kind], steps_of(seed, count), warmup)


def seconds(shared_by: np.ndarray[Any, Any] | None, speeds: np.ndarray[Any, Any]) -> float:
    """Mean seconds of an iteration; both float64 [iterations, machines]; None for BSP."""
    count = speeds.shape[1]
    bounds = Bounds(np.ones(count, dtype=np.int64), np.full(count, BATCH * count, dtype=np.int64))
    total = 0.0
    for index, actual in enumerate(speeds):
        sizes = np.full(count, BATCH)
        if shared_by is not None:
            curves = [Curve(float(speed)) for speed in shared_by[index]]
            sizes = ProportionalBalancer().plan(curves, BATCH * count, bounds)
        total += float((sizes / actual).max())
    return total / len(speeds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench/results/predictors.json"))
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--warmup", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="600 steps and two seeds")
    options = parser.parse_args()
    count, seeds = (600, 2) if options.quick else (options.steps, options.seeds)
    jobs = [(kind, seed, count, options.warmup) for kind in reversed(list(predictors())) for seed in range(seeds)]
    scores = dict(zip(jobs, in_parallel(one, jobs, options.processes), strict=True))
    speeds = np.array([[step.speed for step in steps_of(seed, count)] for seed in range(seeds)]).T[options.warmup :]

    bsp = seconds(None, speeds)
    rows: list[dict[str, Any]] = []
    for kind in predictors():
        found = [scores[kind, seed, count, options.warmup] for seed in range(seeds)]
        told = np.array([score.forecasts for score in found]).T[options.warmup - 1 :]
        errors = [score.rmse for score in found]
        rows.append({"predictor": kind, "rmse": errors, "iteration": seconds(told, speeds) / bsp})
    of = {row["predictor"]: np.array(row["rmse"]) for row in rows}
    best = np.min([errors for kind, errors in of.items() if kind != "mixture"], axis=0)
    table = [
        [
            row["predictor"],
            *(f"{error:.2f}" for error in row["rmse"]),
            f"{np.mean(row['rmse']):.2f}",
            f"{np.mean(of[row['predictor']] / of['ema']):.3f}",
            f"{np.max(of[row['predictor']] / best):.3f}",
            f"{row['iteration']:.3f}",
        ]
        for row in rows
    ]
    oracle = seconds(speeds, speeds) / bsp
    columns = [*(f"seed {seed}" for seed in range(seeds)), "mean RMSE", "RMSE / EMA's", "most / best", "time / BSP's"]
    title = f"{seeds} machines, {count} steps, {options.warmup} of them warm-up; oracle's time {oracle:.3f} of BSP's"
    print_table(title, ["predictor", *columns], table)
    write_json(options.out, {"steps": count, "warmup": options.warmup, "oracle": oracle, "predictors": rows})


if __name__ == "__main__":
    main()
