"""What federation brings each hospital: trains alone, pooled, with FedAvg, LB-BSP and LB-BSP encrypted, and compares.

    python study.py [--seeds 5] [--out runs/study]

Prints AUROC on each hospital's own test patients, and writes it to ``study.json``. Each run's folder has a report, in
which the matrix is, and a model card.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
METRIC = "auroc"
MATRIX = "evaluation={cross_site: {local: true, fine_tune: 20}}"
RUNS = {
    "fedavg": ("strategy.yaml", "silos.yaml", [MATRIX, "name=fedavg", "balancer={kind: fixed}"]),
    "lb-bsp": ("strategy.yaml", "silos.yaml", [MATRIX]),
    "lb-bsp encrypted": ("strategy.yaml", "silos.yaml", ["cipher={kind: bfv}"]),
    "pooled": ("pooled.yaml", "pooled-silos.yaml", []),
}
"""Strategy, silos and what differs, by the row of the table."""

ROWS = ("alone", *RUNS)
T95 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 1.96)
"""Of Student's t, 97.5 %, for 1 to 9 degrees of freedom; then that of the normal distribution."""

Found = dict[tuple[str, str], list[dict[str, Any]]]
"""Figures of each seed, by row of the table and hospital; ``all`` is all hospitals' test patients together."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs/study"))
    options = parser.parse_args()
    found: Found = {}
    for seed in range(options.seeds):
        folder = options.out / f"seed-{seed}"
        for name, (strategy, silos, changes) in RUNS.items():
            print(f"seed {seed}: {name}", flush=True)
            sets = [word for change in changes for word in ("--set", change)]
            run = folder / name.replace(" ", "-")
            where = ("--runtime", "virtual", "--seed", seed, "--out", run)
            fedsync("run", HERE / strategy, "--silos", HERE / silos, *sets, *where)
            fedsync("report", run)
            add(found, name, evaluated(folder / "fedavg", run / "best.pt", run / "evaluated.json"))
        add(found, "alone", json.loads((folder / "fedavg" / "cross_site.json").read_text()), "local")
    hospitals = list(dict.fromkeys(place for _, place in found))
    Console().print(table(found, hospitals))
    document = {f"{row}, {place}": figures for (row, place), figures in found.items()}
    (options.out / "study.json").write_text(json.dumps(document, indent=2) + "\n")


def fedsync(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "fedsync", *map(str, words)], check=True, stdout=subprocess.DEVNULL)


def evaluated(run: Path, model: Path, out: Path) -> dict[str, Any]:
    """How a model does on the test patients of each hospital of a run."""
    fedsync("evaluate", run, "--model", model, "--out", out)
    return dict(json.loads(out.read_text()))


def add(found: Found, row: str, document: dict[str, Any], subject: str = "file") -> None:
    """Put the figures of one model, or of each hospital's own, into a row of the table."""
    metric = document["metrics"][METRIC]
    for model, cells in zip(document["models"], metric["matrix"], strict=True):
        for silo, cell in zip(document["silos"], cells, strict=True):
            if model["subject"] == subject and model["silo"] in (None, silo):
                found.setdefault((row, silo), []).append(cell)
    found.setdefault((row, "all"), []).append(metric["pooled"][subject])


def table(found: Found, hospitals: Iterable[str]) -> Table:
    """A line for each way to train, a column for each hospital."""
    shown = Table(title=f"{METRIC} on each hospital's test patients", title_justify="left")
    shown.add_column("trained")
    for hospital in hospitals:
        shown.add_column(hospital, justify="right")
    for row in ROWS:
        shown.add_row(row, *(text(found.get((row, hospital), [])) for hospital in hospitals))
    return shown


def text(figures: list[dict[str, Any]]) -> str:
    """The number with its interval: over seeds, or of one seed over patients."""
    values = [each["value"] for each in figures if each["value"] is not None]
    if not values:
        return "not estimable"
    if len(values) > 1:
        half = T95[min(len(values) - 1, len(T95)) - 1] * stdev(values) / len(values) ** 0.5
        return f"{mean(values):.3f} ± {half:.3f}"
    low, high = figures[0]["low"], figures[0]["high"]
    return f"{values[0]:.3f}" + (f" [{low:.3f}, {high:.3f}]" if low is not None else "")


if __name__ == "__main__":
    main()
