"""Predictions of ``fedsync tune`` for strategies that it has not seen, against their results on real processes.

A first strategy runs on real processes. Its twin (a simulated copy of the federation) is fitted to the journal, and
predicts the others' seconds a round, each with a 90 % interval. Then these run on real processes. Coverage is the share
of strategies whose measured seconds a round lie in the interval, with an exact (Clopper-Pearson) 95 % interval.

Let others use the machine meanwhile, as they do where silos are. The table shows the load: processes that wanted a
core, a minute's mean, at the end of each run.
"""

from __future__ import annotations

import argparse
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from scipy.stats import beta

from bench.common import print_table, write_json
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.extras.tuning.records import RunRecord, read_record, seconds_a_round
from fedsync.extras.tuning.twin import Interval, Twin
from fedsync.ops.local import run_local

FEWEST_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Foretold:
    """A strategy that ran after it was foretold.

    Args:
        seed: of the run that the twin was fitted to, and of this.
        strategy: its name.
        interval: seconds a round as foretold.
        actual_s: as they were.
        load: processes that wanted a core by its end, a minute's mean.
    """

    seed: int
    strategy: str
    interval: Interval
    actual_s: float
    load: float

    @property
    def covered(self) -> bool:
        return self.interval.misses(self.actual_s) == 0.0


def of_bench(strategy: str, options: argparse.Namespace, seed: int, rounds: int = 1) -> StrategyConfig:
    """A shipped strategy that ends after so many commits."""
    settings = [f"stop={{rounds: {rounds}}}", f"seed={seed}", f"local.steps={options.steps}"]
    return StrategyConfig.load(strategy, settings)


def played(config: StrategyConfig, options: argparse.Namespace) -> RunRecord:
    """A run on real processes, or the one that is there from before."""
    out = options.runs / f"{config.name}-{config.seed}"
    if not (out / "summary.json").exists():
        shutil.rmtree(out, ignore_errors=True)
        run_local(config, ClusterConfig.load(options.silos), out)
    return read_record(out)


def coverage(found: list[Foretold]) -> tuple[float, float, float]:
    """The share that was covered, and its exact 95 % interval."""
    hits, count = sum(one.covered for one in found), len(found)
    low = float(beta.ppf(0.025, hits, count - hits + 1)) if hits else 0.0
    high = float(beta.ppf(0.975, hits + 1, count - hits)) if hits < count else 1.0
    return hits / count, low, high


def measure(options: argparse.Namespace, console: Console) -> list[Foretold]:
    """Fit, foretell and run, once for each seed."""
    found: list[Foretold] = []
    for seed in options.seeds:
        console.print(f"seed {seed}: {options.first} runs, {options.rounds} rounds")
        first = played(of_bench(options.first, options, seed, options.rounds), options)
        twin, replayed = Twin.of(first).checked()
        console.print(f"  its own seconds a round: {replayed.round_s} replayed, {twin.actual_s:.3g} actual")
        seconds = options.rounds * twin.actual_s
        for strategy in options.others:
            said = twin.predict(of_bench(strategy, options, seed)).round_s
            rounds = max(round(seconds / said.mean), FEWEST_ROUNDS)
            console.print(f"  {strategy} is foretold to take {said} s a round, and runs for {rounds}")
            actual_s = seconds_a_round(played(of_bench(strategy, options, seed, rounds), options).rounds)
            assert actual_s is not None
            found.append(Foretold(seed, strategy, said, actual_s, os.getloadavg()[0]))
    return found


def main() -> None:
    """Measure, print the table and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--first", default="lb-bsp", help="the strategy that the twin is fitted to")
    parser.add_argument("--others", nargs="+", default=["fedavg", "lb-a-bsp", "lb-fsp", "ssp", "fedbuff"])
    parser.add_argument("--silos", default="hetero", help="silo file")
    parser.add_argument("--rounds", type=int, default=15, help="of the first run; the others take about as long")
    parser.add_argument("--steps", type=int, default=20, help="local steps of an order")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/foretold"), help="folder of the runs; those there count"
    )
    parser.add_argument("--out", type=Path, default=Path("bench/results/foretold.json"))
    options = parser.parse_args()
    found = measure(options, Console(width=120, highlight=False))
    rows = [
        [
            one.seed,
            one.strategy,
            f"{one.interval.low:.2f} to {one.interval.high:.2f}",
            f"{one.actual_s:.2f}",
            "yes" if one.covered else f"no, by {100 * one.interval.misses(one.actual_s):.0f} %",
            f"{one.load:.1f}",
        ]
        for one in found
    ]
    title = f"seconds a round, foretold from a run of {options.first} with 90 % and found on real processes"
    print_table(title, ("seed", "strategy", "foretold", "found", "covered", "load"), rows)
    share, low, high = coverage(found)
    exact = f"95 % interval of the share: {100 * low:.0f} to {100 * high:.0f} %"
    print(f"covered: {100 * share:.0f} % of {len(found)} ({exact})")
    write_json(
        options.out,
        {"covered": share, "low": low, "high": high, "runs": [asdict(one) | {"covered": one.covered} for one in found]},
    )


if __name__ == "__main__":
    main()
