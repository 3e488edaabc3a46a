"""FedBN against FedAvg: the gain of private norms where the features of silos differ, and where they do not.

Five silos have scikit-learn's digits as from five scanners: unchanged, inverted, pale, overdrawn, textured.
FedAvg shares the whole network. FedBN (Li et al., ICLR 2021, arXiv:2102.07623) shares all but batch norm, which is one
line of the strategy: ``model: {private: ["norm*"]}``. In between, ``statistics`` keeps only the running means and
variances private. Each side uses its best learning rate of one grid, chosen on separate seeds. The seeds of the table
are the same for all sides. Accuracy is that of the last version, pooled over silos: each tests with its own samples and
its own private part.

    python bench/papers/fedbn.py [--seeds 10] [--rounds 20] [--processes 2] [--quick] [--out FILE.json]

Virtual time: the seconds of the silos play no part.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.common import in_parallel, print_table, write_json
from fedsync.common.errors import RunError
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.simulation.run import run_virtual

TASK = Path(__file__).parent / "fedbn_task.py"
SILOS = ClusterConfig.model_validate({"silos": [{"name": f"scanner-{n}", "speed": 1000} for n in range(5)]})
PRIVATE = {"FedAvg": [], "statistics": ["norm*.running_*", "norm*.num_batches_tracked"], "FedBN": ["norm*"]}
RATES = (0.01, 0.03, 0.1, 0.3, 1.0)
TUNING = 1000
"""First of the seeds by which rates are chosen."""


@dataclass(frozen=True)
class Job:
    """One run."""

    side: str
    shift: bool
    rate: float
    seed: int
    rounds: int


def accuracy(job: Job) -> float:
    """Share of right answers at the end; 0 where training diverged."""
    task = {"kind": "custom", "file": str(TASK), "options": {"shift": job.shift}}
    sets = [
        f"task={json.dumps(task)}",
        f"model={json.dumps({'private': PRIVATE[job.side]})}",
        f"local={{steps: 10, batch_size: 32, learning_rate: {job.rate}}}",
        f"stop={{rounds: {job.rounds}}}",
        f"seed={job.seed}",
    ]
    with tempfile.TemporaryDirectory() as folder:
        try:
            summary = run_virtual(StrategyConfig.load("fedavg", sets), SILOS, Path(folder))
        except RunError:
            return 0.0
    return float(summary["accuracy"])


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean of differences and half the width of its 95 % interval, by Student's t."""
    from scipy.stats import t

    found = np.asarray(values)
    half = t.ppf(0.975, len(found) - 1) * found.std(ddof=1) / np.sqrt(len(found)) if len(found) > 1 else np.nan
    return float(found.mean()), float(half)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10, help="of the table")
    parser.add_argument("--tuning", type=int, default=3, help="seeds by which each side's learning rate is chosen")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="learning rates that each side tries")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="two rounds, two rates: to see that it works")
    parser.add_argument("--out", type=Path, default=Path("bench/results/fedbn.json"))
    options = parser.parse_args()
    rates, rounds = tuple(options.rates), options.rounds
    seeds, tuning = range(options.seeds), range(TUNING, TUNING + options.tuning)
    if options.quick:
        rates, seeds, tuning, rounds = (0.03, 0.1), range(2), range(TUNING, TUNING + 1), 2
    sides = [(side, shift) for shift in (True, False) for side in PRIVATE]

    tried = [Job(*side, rate, seed, rounds) for side in sides for rate in rates for seed in tuning]
    scores = dict(zip(tried, in_parallel(accuracy, tried, options.processes), strict=True))
    means = {
        (*side, rate): float(np.mean([scores[Job(*side, rate, seed, rounds)] for seed in tuning]))
        for side in sides
        for rate in rates
    }
    best = {side: max(rates, key=lambda rate: means[(*side, rate)]) for side in sides}
    jobs = [Job(*side, best[side], seed, rounds) for side in sides for seed in seeds]
    found = dict(zip(jobs, in_parallel(accuracy, jobs, options.processes), strict=True))

    rows, results = [], []
    for side, shift in sides:
        of_side = [found[Job(side, shift, best[side, shift], seed, rounds)] for seed in seeds]
        fedavg = [found[Job("FedAvg", shift, best["FedAvg", shift], seed, rounds)] for seed in seeds]
        gain, half = interval([100 * (one - other) for one, other in zip(of_side, fedavg, strict=True)])
        features = "five scanners" if shift else "one scanner"
        against = "" if side == "FedAvg" else f"{gain:+.1f} +- {half:.1f}"
        tried_at = " ".join(f"{100 * means[side, shift, rate]:.1f}" for rate in rates)
        rows.append([features, side, best[side, shift], f"{100 * np.mean(of_side):.1f}", against, tried_at])
        results.append({
            "features": features, "side": side, "private": PRIVATE[side], "learning_rate": best[side, shift],
            "accuracy": of_side, "gain_points": gain, "gain_half_width_points": half,
            "tuning": {str(rate): means[side, shift, rate] for rate in rates},
        })  # fmt: skip
    title = f"Accuracy [%] after {rounds} rounds of five silos, {len(seeds)} seeds; gain over FedAvg in points, 95 %"
    rate_names = " ".join(f"{rate:g}" for rate in rates)
    print_table(title, ["features", "side", "best rate", "accuracy", "gain", f"while tuning, at {rate_names}"], rows)
    write_json(options.out, {"rounds": rounds, "seeds": len(seeds), "tuning_seeds": len(tuning), "rows": results})


if __name__ == "__main__":
    main()
