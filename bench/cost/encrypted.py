"""Cost of encryption to a run: accuracy, and seconds end to end.

    python bench/cost/encrypted.py [--parts accuracy seconds] [--quick] [--processes N] [--out FILE.json]

- ``accuracy``: 30 rounds of LB-BSP on non-i.i.d. digits in virtual time, real ciphertexts, five seeds. The silos have
  360 test samples, so one more correct is 0.28 points. Training is chaotic: a different last bit changes the end
  result. So the figure is the mean over seeds of the mean over the last ten rounds. Plain runs that differ by a
  rounding to 24 bits only show the noise to compare with.
- ``seconds``: LB-BSP on real Flower processes with a model of a million parameters, in the clear and under ``bfv``,
  in turns, several times: seconds from the first order to the last commit, and the silos' seconds of sealing and
  opening.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import in_parallel, print_table, write_json
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.events import UpdateArrived
from fedsync.core.journal import read_journal
from fedsync.observe.replay import read_ledger

PARTS = ("accuracy", "seconds")
CIPHERS = {"plain": "{kind: plain}", "bfv, 16 bit": "{kind: bfv, bits: 16}", "bfv, 8 bit": "{kind: bfv, bits: 8}"}
NOISE = "plain, 24 bit"
LAST = 10
SILOS = {"silos": [{"name": name, "speed": speed} for name, speed in (("a", 640), ("b", 480), ("c", 320))]}


def accuracy_run(job: tuple[str, int, int]) -> dict[str, Any]:
    name, seed, rounds = job
    from fedsync.simulation.run import run_virtual

    overrides = [f"seed={seed}", f"stop.rounds={rounds}", f"cipher={CIPHERS.get(name, '{kind: plain}')}"]
    config = StrategyConfig.load("lb-bsp", overrides)
    if name == NOISE:
        _round_updates()
    with tempfile.TemporaryDirectory() as folder:
        run_virtual(config, ClusterConfig.load("hetero"), Path(folder))
        rows = read_ledger(Path(folder) / "journal.jsonl").rounds
    return {"cipher": name, "seed": seed, "accuracy": [row.accuracy for row in rows if row.accuracy is not None]}


def _round_updates() -> None:
    """Have plain silos in this process round their updates, relative to the largest value, to 24 bits."""
    from fedsync.model.plain_replica import PlainReplica

    def send(self: PlainReplica, update: Any, order: Any, report: Any) -> Any:
        step = np.float32(np.abs(update).max() * 2.0**-23)
        return (np.rint(update / step) * step).astype(np.float32) if step else update

    PlainReplica.send = send  # type: ignore[method-assign]


def accuracy(quick: bool, processes: int) -> list[dict[str, Any]]:
    rounds, seeds = (3, 1) if quick else (30, 5)
    names = [*CIPHERS, NOISE]
    # A rounding process stays one: those jobs come last, and alone.
    jobs = [(name, 7 + seed, rounds) for name in CIPHERS for seed in range(seeds)]
    runs = in_parallel(accuracy_run, jobs, processes)
    runs += in_parallel(accuracy_run, [(NOISE, 7 + seed, rounds) for seed in range(seeds)], processes)
    late = {(run["cipher"], run["seed"]): 100 * float(np.mean(run["accuracy"][-LAST:])) for run in runs}
    rows = []
    for name in names:
        differences = [late[name, 7 + seed] - late["plain", 7 + seed] for seed in range(seeds)]
        mean = float(np.mean([late[name, 7 + seed] for seed in range(seeds)]))
        rows.append((name, f"{mean:.2f}", f"{np.mean(differences):+.2f}", f"{np.std(differences):.2f}"))
    title = f"Accuracy [%] after {rounds} rounds of non-i.i.d. digits, mean of the last {LAST} and of {seeds} seed(s)"
    print_table(title, ("cipher", "accuracy", "to plain [points]", "std over seeds"), rows)
    return runs


def seconds_run(name: str, rounds: int) -> dict[str, Any]:
    from fedsync.ops.local import run_local

    task = f"{{kind: custom, file: {Path(__file__).with_name('million.py')}}}"
    overrides = [f"task={task}", f"stop.rounds={rounds}", "local.steps=20", f"cipher={CIPHERS[name]}"]
    config = StrategyConfig.load("lb-bsp", overrides)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        summary = run_local(config, ClusterConfig.model_validate(SILOS), out)
        reports = [
            event.report
            for entry in read_journal(out / "journal.jsonl")[1]
            for event in entry.events
            if isinstance(event, UpdateArrived)
        ]
        rows = read_ledger(out / "journal.jsonl").rounds
    # The first round starts processes and loads data.
    settled = [row.seconds for row in rows[1:]]
    cost = {
        kind: float(np.median([report.overhead_s.get(kind, 0.0) for report in reports])) for kind in ("seal", "open")
    }
    return {"cipher": name, "round_s": settled, "seconds": summary["seconds"], **cost}


def seconds(quick: bool) -> list[dict[str, Any]]:
    rounds, repeats = (3, 1) if quick else (9, 3)
    runs = [seconds_run(name, rounds) for _ in range(repeats) for name in ("plain", "bfv, 16 bit")]
    plain = float(np.median([s for run in runs if run["cipher"] == "plain" for s in run["round_s"]]))
    rows = []
    for name in ("plain", "bfv, 16 bit"):
        mine = [run for run in runs if run["cipher"] == name]
        median = float(np.median([s for run in mine for s in run["round_s"]]))
        seal, opened = (float(np.median([run[kind] for run in mine])) for kind in ("seal", "open"))
        rows.append((name, f"{median:.2f}", f"{median / plain:.3f}", f"{seal:.2f}", f"{opened:.2f}"))
    title = f"LB-BSP on real processes, a million parameters, {repeats} run(s) of {rounds} rounds, medians [s]"
    print_table(title, ("cipher", "round", "to plain", "seal an update", "open a sum"), rows)
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it works")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("bench/results/encrypted.json"))
    options = parser.parse_args()
    results: dict[str, Any] = {}
    if "accuracy" in options.parts:
        results["accuracy"] = accuracy(options.quick, options.processes)
    if "seconds" in options.parts:
        results["seconds"] = seconds(options.quick)
    write_json(options.out, results)


if __name__ == "__main__":
    main()
