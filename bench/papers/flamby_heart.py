"""FLamby's Heart Disease benchmark with FedSync: accuracy over all 254 test rows, beside FLamby's own results.

    python bench/papers/flamby_heart.py [--seeds 5] [--quick] [--out FILE.json]

Ogier du Terrail et al. 2022, arXiv:2210.04620. The setting is FLamby's: rows, columns, split and first models
(`flamby_heart_task.py`), batches of 4, 100 local updates a round, 15 rounds, weights by rows, and learning rates. The
published figures are means over the files ``heart_seed42.csv`` to ``heart_seed46.csv`` of their repository at edacf54.
The runs here have the same five seeds. Only the order of batches within a silo differs.

The table has two tests of each model, each beside FLamby's. "common scale" is their "Pooled Test": rows in deviations
of all training rows, although the model was trained on rows in the deviations of each centre. "own scale" is the mean
over rows of their "client_test": rows as in training.

FLamby's FedAdam has no bias correction; Flower's, which FedSync has, does. So each has a row: the correction
shortens each of the 15 steps to a third or less.

Rows without a published figure are FedSync's. They have the same rounds, updates and batches, or for batches by speed
the same number of rows a round, and FLamby's rates for FedYogi, or the defaults of `cautious-adam`. No rate was tuned.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from bench.common import print_table, write_json
from bench.papers.fedbn import interval
from bench.papers.flamby_heart_task import CENTRES, accuracy
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.model.server_optimizer import Adaptive, Moments, ServerOptimizer
from fedsync.policies.optimize.optimizer_policies import FedAdam
from fedsync.policies.schema import register
from fedsync.simulation.run import run_virtual

TASK = Path(__file__).parent / "flamby_heart_task.py"
FIRST_SEED, ROUNDS, STEPS = 42, 15, 100
EQUAL = ClusterConfig.model_validate({"silos": [{"name": name, "speed": 100} for name in CENTRES]})
SPREAD = ClusterConfig.model_validate(
    {"silos": [{"name": name, "speed": speed} for name, speed in zip(CENTRES, (100, 200, 250, 300), strict=True)]}
)
ONE = ClusterConfig.model_validate({"silos": [{"name": "one", "speed": 100}]})
ADAM = "server_optimizer={kind: fedadam, rate: 0.01, beta_1: 0.9, beta_2: 0.999, tau: 1.0e-8}"
PLAIN_ADAM = ADAM.replace("fedadam", "flamby-adam")
YOGI = "server_optimizer={kind: fedyogi, rate: 0.01, beta_1: 0.9, beta_2: 0.999, tau: 1.0e-8}"
ADAGRAD = "server_optimizer={kind: fedadagrad, rate: 0.316228, tau: 1.0e-8}"
SCAFFOLD = ("server_optimizer={kind: scaffold}", "aggregation={kind: fednova, weight: examples}")


class Uncorrected(Adaptive):
    """Adam without bias correction."""

    def _factor(self, moments: Moments) -> float:
        return self.rate


@register("flamby-adam")
@dataclass(frozen=True, slots=True)
class FlambyAdam(FedAdam):
    """FLamby's FedAdam."""

    def build(self) -> ServerOptimizer:
        return Uncorrected("adam", self.rate, self.beta_1, self.beta_2, self.tau, self.grace)


@dataclass(frozen=True)
class Row:
    """A method of the table."""

    rate: float
    sets: tuple[str, ...] = ()
    published: tuple[float, float] | None = None
    base: str = "fedavg"
    silos: ClusterConfig = EQUAL
    centres: tuple[int, ...] = ()
    common: bool = False

    def local(self) -> str:
        if not self.centres:
            return f"local={{steps: {STEPS}, batch_size: 4, learning_rate: {self.rate}, threads: 1}}"
        steps = 50 * -(-(486 if len(self.centres) > 1 else 199) // 4)  # 50 passes, as in FLamby
        return f"local={{steps: {steps}, batch_size: 4, learning_rate: {self.rate}, optimizer: adam, threads: 1}}"


ROWS = {
    "pooled, Adam": Row(0.001, published=(0.7953, 0.7496), silos=ONE, centres=(0, 1, 2, 3)),
    "largest centre alone, Adam": Row(0.001, published=(0.7843, 0.7339), silos=ONE, centres=(0,)),
    "FedAvg": Row(0.001, published=(0.748, 0.7055)),
    "SCAFFOLD": Row(0.001, SCAFFOLD, (0.748, 0.7039)),
    "FedAdam, FLamby's formula": Row(0.01, (PLAIN_ADAM,), (0.7787, 0.7339)),
    "FedAdam, Flower's formula": Row(0.01, (ADAM,), (0.7787, 0.7339)),
    "FedYogi": Row(0.003162, (YOGI,), (0.7787, 0.7409)),
    "FedAdagrad": Row(0.003162, (ADAGRAD,), (0.7787, 0.7409)),
    "FedAvg, common scale in training": Row(0.001, common=True),
    "FedYogi, common scale in training": Row(0.003162, (YOGI,), common=True),
    "cautious-adam": Row(0.01, ("server_optimizer={kind: cautious-adam}",)),
    "lb-bsp, speeds 1 to 3, FedYogi": Row(0.003162, (YOGI,), base="lb-bsp", silos=SPREAD),
    "lb-bsp, speeds 1 to 3, FedYogi, bfv": Row(0.003162, (YOGI, "cipher={kind: bfv}"), base="lb-bsp", silos=SPREAD),
}


def measured(row: Row, seed: int, folder: Path) -> tuple[float, float]:
    """Accuracy of one run's last model, by the common scale and by each centre's own."""
    options = {"seed": seed, "centres": row.centres, "common": row.common}
    task = {"kind": "custom", "file": str(TASK), "options": options}
    stop = f"stop={{rounds: {1 if row.centres else ROUNDS}}}"
    config = StrategyConfig.load(row.base, [f"seed={seed}", stop, row.local(), f"task={json.dumps(task)}", *row.sets])
    run_virtual(config, row.silos, folder)
    model = torch.nn.Linear(13, 1)
    model.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    return accuracy(model), accuracy(model, own=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one seed of FedAvg and FedYogi")
    parser.add_argument("--out", type=Path, default=Path("bench/results/flamby_heart.json"))
    args = parser.parse_args()
    seeds = range(FIRST_SEED, FIRST_SEED + (1 if args.quick else args.seeds))
    rows = {name: ROWS[name] for name in ("FedAvg", "FedYogi")} if args.quick else ROWS
    cells, shown = {}, []
    for name, row in rows.items():
        found = []
        for seed in seeds:
            with TemporaryDirectory() as folder:
                found.append(measured(row, seed, Path(folder)))
        cells[name] = {"rate": row.rate, "seeds": found, "published": row.published}
        shown.append([name, f"{row.rate:g}"])
        for at, by_seed in enumerate(zip(*found, strict=True)):
            shown[-1] += [
                "{:.3f} ± {:.3f}".format(*interval(by_seed)),
                "-" if row.published is None else f"{row.published[at]:.3f}",
            ]
        print(*shown[-1], flush=True)
    columns = ["method", "rate", "common scale", "FLamby", "own scale", "FLamby"]
    print_table(f"FLamby Heart, accuracy over 254 test rows, {len(seeds)} seeds, 95 % interval", columns, shown)
    write_json(args.out, {"rounds": ROUNDS, "steps": STEPS, "rows": cells})


if __name__ == "__main__":
    main()
