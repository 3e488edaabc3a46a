"""LB-BSP against FedAvg with large models on real processes, in the clear and encrypted with ``bfv``.

    python bench/papers/large_real.py [--models dense transformer] [--pairs 1] [--quick] [--out FILE]

Four silos, whose speeds are throttled from 1 to 3, train with `fedsync run --runtime local`: SuperLink, SuperNodes,
agents and trainers are processes of this machine. FedAvg and ``lb-bsp`` have the same steps, rate and optimizer, and
alternate, in the clear and with ``bfv``. A run ends when the loss on the shared test split reaches the model's target.

| model | parameters | slowest silo | target | fixed by |
|---|---|---|---|---|
| dense | 25 million (ResNet-50's size), digits28 | 16 samples/s | loss 1.2 | FedAvg in virtual time: six rounds |
| transformer | 32 thousand, characters of a text | 128 samples/s | loss 3.0 nats | as in `map.py` |

The machine must be idle: a silo that cannot keep its speed is cut off by the barrier of ``lb-bsp``, and its steps are
missing. In virtual time the transformer's loss takes FedAvg 26 rounds and 135 s, and ``lb-bsp`` 27 rounds and 71 s.

*Computing* is the share of the silos' time that is training. *Bound* is the seconds a round with perfect balance,
divided by FedAvg's. The overhead (all but the slowest silo's training) stays as under FedAvg.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

from bench.common import alternated, markdown_table, print_table, write_json
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.journal import JOURNAL
from fedsync.observe.replay import read_ledger
from fedsync.ops.local import run_local

FEDAVG, BALANCED = "fedavg", "lb-bsp"
CIPHERS = ("plain", "bfv")
SPREAD = (1.0, 5 / 3, 7 / 3, 3.0)
"""Speeds of the silos, over that of the slowest."""

BATCH = 32
COLUMNS = ("model", "cipher", "strategy", "s to the loss", "rounds", "s a round", "computing", "ratio", "bound")


@dataclass(frozen=True, slots=True)
class Learning:
    """A task, its local steps and rate, the speed of the slowest silo [samples/s], and the loss to reach."""

    task: str
    steps: int
    rate: float
    speed: float
    target: float
    rounds: int = 60


_DENSE = "{kind: mlp, hidden: [4600, 4600], data: {kind: digits28, samples: 2000, test_samples: 400}}"
MODELS = {
    "dense": Learning(_DENSE, 8, 0.2, 16.0, 1.2),
    "transformer": Learning(f"{{kind: custom, file: {Path(__file__).with_name('text_task.py')}}}", 20, 0.3, 128.0, 3.0),
}


@dataclass(frozen=True, slots=True)
class LargeRun:
    """One run; ``computing`` is a share of all silos' time, ``slowest_s`` the slowest silo's training in a round."""

    model: str
    cipher: str
    strategy: str
    seconds: float
    rounds: int
    computing: float
    slowest_s: float
    stopped_by: str

    @property
    def round_s(self) -> float:
        return self.seconds / self.rounds


def run(model: str, cipher: str, strategy: str, *, quick: bool) -> LargeRun:
    learning = MODELS[model]
    steps, rounds = (1, 2) if quick else (learning.steps, learning.rounds)
    settings = [
        f"task={learning.task}",
        f"local={{steps: {steps}, batch_size: {BATCH}, optimizer: sgd, learning_rate: {learning.rate}, threads: 1}}",
        f"cipher={{kind: {cipher}}}",
        f"stop={{rounds: {rounds}, target: {{metric: loss, at_most: {learning.target}}}}}",
    ]
    silos = [{"name": f"silo-{at}", "speed": learning.speed * share} for at, share in enumerate(SPREAD)]
    with tempfile.TemporaryDirectory(prefix="large-") as folder:
        run_local(StrategyConfig.load(strategy, settings), ClusterConfig.model_validate({"silos": silos}), Path(folder))
        summary = read_ledger(Path(folder) / JOURNAL).summary()
    slowest = max(silo["compute_s"] for silo in summary["silos"]) / summary["rounds"]
    reason = str(summary["stopped_by"])
    print(
        f"{model}, {cipher}, {strategy}: {summary['seconds']:.0f} s, {summary['rounds']} rounds, {reason}", flush=True
    )
    return LargeRun(
        model, cipher, strategy, summary["seconds"], summary["rounds"], summary["utilisation"], slowest, reason
    )


def bound(fedavg: LargeRun) -> float:
    overhead_s = max(fedavg.round_s - fedavg.slowest_s, 0.0)
    return (fedavg.slowest_s / fmean(SPREAD) + overhead_s) / fedavg.round_s


def table(first: list[LargeRun], second: list[LargeRun]) -> list[list[str]]:
    """Rows of both strategies, each the mean of its runs."""
    base, rows = fmean(each.seconds for each in first), []
    for side in (first, second):
        seconds, name = fmean(each.seconds for each in side), side[0].strategy
        rounds, computing = fmean(each.rounds for each in side), fmean(each.computing for each in side)
        limit = f"{fmean(map(bound, first)):.2f}" if side is second else ""
        missed = any("target" not in each.stopped_by for each in side)
        rows.append(
            [
                *(side[0].model, side[0].cipher, name, f"{seconds:.0f}" + (" (missed)" if missed else "")),
                *(f"{rounds:.0f}", f"{seconds / rounds:.1f}", f"{computing:.0%}", f"{seconds / base:.2f}", limit),
            ]
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--ciphers", nargs="+", choices=CIPHERS, default=list(CIPHERS))
    parser.add_argument("--pairs", type=int, default=1, help="runs of each side")
    parser.add_argument("--quick", action="store_true", help="two rounds of one step: to see that it works")
    parser.add_argument("--out", type=Path, default=Path("bench/results/large_real.json"))
    options = parser.parse_args()
    runs: list[LargeRun] = []
    rows: list[list[str]] = []
    for model in options.models:
        for cipher in options.ciphers:
            one, other = (partial(run, model, cipher, name, quick=options.quick) for name in (FEDAVG, BALANCED))
            first, second = alternated(one, other, options.pairs)
            runs += [*first, *second]
            rows += table(first, second)
    write_json(options.out, [asdict(each) for each in runs])
    print_table("four silos with speeds from 1 to 3, real processes", COLUMNS, rows)
    print(markdown_table(COLUMNS, rows))


if __name__ == "__main__":
    main()
