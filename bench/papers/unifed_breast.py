"""UniFed's benchmark ``breast_horizontal`` with FedSync: AUC over the 114 test rows, beside UniFed's own results.

    python bench/papers/unifed_breast.py [--seeds 5] [--quick] [--out FILE.json]

UniFed, arXiv:2207.10308. The setting is UniFed's: rows, clients and models (`unifed_breast_task.py`), and from
``paper_experiments/flower.breast_horizontal.*.json`` of https://github.com/AI-secure/FLBenchmark-toolkit at 166a7a4: 30
rounds of one epoch, batches of 32, SGD with a rate of 0.01 and momentum 0.9, whose state begins anew in each round, and
weights by rows. The published figures are of https://unifedbenchmark.github.io/leaderboard at bd78d74 (2023-06-27).

An epoch of UniFed has eight batches, the last with three or four rows. A round here has eight batches of 32.

UniFed chooses hyperparameters by grid searches and does not publish the grids. Tuned rows choose among five rates, by
the mean AUC of three other seeds over a fifth of each client's training rows, which those runs do not train on. The
rate is the server's where a server optimizer is used; the silos then keep UniFed's 0.01. The test rows choose nothing.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import torch

from bench.common import print_table, write_json
from bench.papers.fedbn import interval
from bench.papers.unifed_breast_task import MODELS, area, network
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.simulation.run import run_virtual

TASK = Path(__file__).parent / "unifed_breast_task.py"
FIRST_SEED, TUNING_SEEDS = 0, (1000, 1001, 1002)
RATE = 0.01
RATES = (0.001, 0.003, 0.01, 0.03, 0.1)
SERVER_RATES = (0.03, 0.1, 0.3, 1.0, 3.0)
EQUAL = ClusterConfig.model_validate({"silos": [{"name": "guest", "speed": 100}, {"name": "host", "speed": 100}]})
SPREAD = ClusterConfig.model_validate({"silos": [{"name": "guest", "speed": 100}, {"name": "host", "speed": 300}]})
ONE = ClusterConfig.model_validate({"silos": [{"name": "one", "speed": 100}]})


@dataclass(frozen=True)
class Row:
    """A method of the table.

    Args:
        base: strategy file.
        optimizer: kind of the server optimizer; empty without.
        rates: to choose from; one alone is not tuned.
        sets: further changes of the strategy file.
        silos: machines.
        parts: clients whose rows the only silo has; empty with both clients as silos.
    """

    base: str = "fedavg"
    optimizer: str = ""
    rates: tuple[float, ...] = (RATE,)
    sets: tuple[str, ...] = ()
    silos: ClusterConfig = EQUAL
    parts: tuple[str, ...] = ()

    def changes(self, rate: float) -> list[str]:
        steps = 15 if len(self.parts) > 1 else 8
        local = f"steps: {steps}, batch_size: 32, learning_rate: {RATE if self.optimizer else rate}, momentum: 0.9"
        server = [f"server_optimizer={{kind: {self.optimizer}, rate: {rate}}}"] if self.optimizer else []
        return ["stop={rounds: 30}", f"local={{{local}, threads: 1}}", *server, *self.sets]


ROWS = {
    "pooled rows": Row(silos=ONE, parts=("guest", "host")),
    "host alone": Row(silos=ONE, parts=("host",)),
    "FedAvg": Row(),
    "FedAvg, tuned": Row(rates=RATES),
    "cautious-adam, tuned": Row(optimizer="cautious-adam", rates=SERVER_RATES),
    "lb-bsp, speeds 1 and 3": Row("lb-bsp", silos=SPREAD),
    "lb-bsp, speeds 1 and 3, tuned": Row("lb-bsp", rates=RATES, silos=SPREAD),
    "lb-bsp, speeds 1 and 3, bfv": Row("lb-bsp", sets=("cipher={kind: bfv}",), silos=SPREAD),
}
PUBLISHED = {
    "logistic_regression": (0.9818, 0.9813, 0.9879),
    "mlp_128": (0.9869, 0.9822, 0.9879),
    "mlp_128_128_128": (0.9874, 0.9819, 0.9874),
}
"""AUC of UniFed's Flower; lowest and highest of eight frameworks, but for FATE's logistic regression with 0.6239."""


def measured(row: Row, name: str, rate: float, seed: int, *, tuning: bool = False) -> float:
    """AUC of the last model of one run."""
    task = {"kind": "custom", "file": str(TASK), "options": {"name": name, "parts": row.parts, "tuning": tuning}}
    config = StrategyConfig.load(row.base, [f"seed={seed}", f"task={json.dumps(task)}", *row.changes(rate)])
    with TemporaryDirectory() as folder:
        run_virtual(config, row.silos, Path(folder))
        model = network(name)
        model.load_state_dict(torch.load(Path(folder) / "model.pt", weights_only=True))
    return area(model, tuning)


def chosen(row: Row, name: str) -> float:
    """Rate with the highest mean AUC over held-out training rows; the lowest of equal ones."""
    if len(row.rates) == 1:
        return row.rates[0]
    means = {rate: fmean(measured(row, name, rate, seed, tuning=True) for seed in TUNING_SEEDS) for rate in row.rates}
    return max(row.rates, key=lambda rate: (means[rate], -rate))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one seed of FedAvg and lb-bsp, untuned")
    parser.add_argument("--out", type=Path, default=Path("bench/results/unifed_breast.json"))
    args = parser.parse_args()
    seeds = range(FIRST_SEED, FIRST_SEED + (1 if args.quick else args.seeds))
    rows = {name: ROWS[name] for name in ("FedAvg", "lb-bsp, speeds 1 and 3")} if args.quick else ROWS
    cells, shown = {}, []
    for method, row in rows.items():
        shown.append([method])
        for name in MODELS:
            rate = chosen(row, name)
            found = [measured(row, name, rate, seed) for seed in seeds]
            cells[f"{method}, {name}"] = {"rate": rate, "seeds": found}
            shown[-1].append("{:.4f} ± {:.4f}, {:g}".format(*interval(found), rate))
        print(*shown[-1], sep=" | ", flush=True)
    for place, title in enumerate(("UniFed, Flower", "UniFed, lowest", "UniFed, highest")):
        shown.append([title, *(f"{PUBLISHED[name][place]:.4f}" for name in MODELS)])
    title = f"UniFed breast_horizontal, AUC over 114 test rows, {len(seeds)} seeds, 95 % interval; and rate"
    print_table(title, ["method", *MODELS], shown)
    write_json(args.out, {"rounds": 30, "published": PUBLISHED, "rows": cells})


if __name__ == "__main__":
    main()
