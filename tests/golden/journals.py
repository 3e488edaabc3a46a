"""The runs behind the journals in this folder: every shipped strategy, LB-BSP by hand, and features of their own.

Three silos, some virtual seconds, workers that compute nothing; speeds are powers of two, so that most times are exact.
The journals are what these runs wrote when they were last looked at. If a change of the code is meant to change
decisions, regenerate them on purpose and read the difference before committing it, from the repository's root:

    python -m tests.golden.journals [NAME ...]
    git diff tests/golden

Barriers have no journals of their own: the laws run every kind, and ``tests/policies/barrier`` has the papers' numbers.
"""

import sys
import tempfile
from pathlib import Path

from fedsync.config.locate import locate
from fedsync.config.strategy import StrategyConfig
from tests.simulation.fake import Result, machines, simulate, strategy

FOLDER = Path(__file__).parent

BY_HAND = "lb-bsp"
"""Speeds 3 : 2 : 1, an overhead, and a memory for 20 samples; three rounds of 4 steps."""

SECONDS = {"fsp": 8.0, "lb-fsp": 8.0, "lb-fsp-psp": 8.0, "fedcompass": 10.0, "deadline": 8.0}
"""Length of a shipped strategy's run; others take 4 s. Rounds of some seconds need more."""

FEATURES: dict[str, list[str]] = {
    "best": ["evaluation={best: {metric: accuracy}}", "stop.patience={metric: accuracy, versions: 2}"],
    "cross-site": ["evaluation={cross_site: {local: true, fine_tune: 4}}"],
    "scaffold": ["server_optimizer={kind: scaffold}", "aggregation={kind: fednova}"],
    "server-adam": ["server_optimizer={kind: fedadam}"],
    "presence": [],
    "crashes": [],
}
"""Runs of FedAvg with one optional feature each, by what is added to the strategy."""

_MACHINES: dict[str, dict[str, object]] = {
    "presence": {"presence": {"for_s": 1.5, "every_s": 2.5}},
    "crashes": {"faults": [{"at_s": 1.0, "down_s": 1.5}]},
}
"""Additions to silo b."""


def names() -> list[str]:
    strategies = sorted(f"strategy-{path.stem}" for path in locate("fedavg").parent.glob("*.yaml"))
    return [BY_HAND, *strategies, *(f"feature-{name}" for name in FEATURES)]


def journal(name: str) -> Path:
    return FOLDER / f"{name}.jsonl"


def run(name: str, out: Path) -> Result:
    """Orders of a shipped strategy take a, b and c about 0.5, 1.25 and 2 s, or a third of that."""
    if name == BY_HAND:
        silos = machines({"speed": 300.0}, {"speed": 200.0, "overhead_s": 0.5}, {"speed": 100.0, "memory_samples": 20})
        balancer = {"kind": "proportional", "gradient_noise": 0}
        return simulate(out, silos, strategy(local={"steps": 4, "batch_size": 24}, balancer=balancer))
    of, _, kind = name.partition("-")
    changes = ["local.steps=4", f"stop={{seconds: {SECONDS.get(kind, 10.0 if of == 'feature' else 4.0)}}}"]
    second = {"speed": 128.0, "overhead_s": 0.25, **(_MACHINES.get(kind, {}) if of == "feature" else {})}
    silos = machines({"speed": 256.0}, second, {"speed": 64.0})
    if of == "feature":
        return simulate(out, silos, StrategyConfig.load("fedavg", [*changes, *FEATURES[kind]]))
    return simulate(out, silos, StrategyConfig.load(kind, changes))


BOOKS = ("summary.json", "rounds.jsonl", "config.yaml", "silos.yaml")
"""Further files of the run by hand, in ``books/``."""


def main(chosen: list[str]) -> None:
    """Write the journals anew: those chosen, or all, and then none that has no run is left."""
    for name in chosen or names():
        with tempfile.TemporaryDirectory() as folder:
            journal(name).write_text(run(name, Path(folder)).text, encoding="utf-8")
            for file in BOOKS if name == BY_HAND else ():
                (FOLDER / "books" / file).write_bytes((Path(folder) / file).read_bytes())
    if not chosen:
        for path in FOLDER.glob("*.jsonl"):
            if path.stem not in names():
                path.unlink()


if __name__ == "__main__":
    main(sys.argv[1:])
