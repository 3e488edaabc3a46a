"""Files that say how good the models of a run are, with made-up numbers, for any silos and metrics."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

METRICS = {"auroc": True, "accuracy": True, "f1": True, "brier": False, "calibration_error": False}
"""Names, and whether more is better."""

Cell = dict[str, Any]


def cell(value: float | None, half: float | None = 0.03, **support: int) -> Cell:
    """An estimate; without ``half`` there is no interval."""
    ends = (None, None) if value is None or half is None else (value - half, value + half)
    return {"value": value, "low": ends[0], "high": ends[1], "support": support or {"0": 40, "1": 30}}


def evaluated(silos: Sequence[str], base: float, version: int, metrics: dict[str, bool]) -> dict[str, Any]:
    """What was found of one model; the worst silo is the first. The last has too few samples of a class."""
    good = {silo: base - 0.1 + 0.1 * index / max(len(silos) - 1, 1) for index, silo in enumerate(silos)}
    own = {
        silo: {name: cell(value if better else 1 - value) for name, better in metrics.items()}
        for silo, value in good.items()
    }
    if len(silos) > 2:
        own[silos[-1]] = {name: cell(None, **{"0": 31, "1": 2}) for name in metrics}
    pooled = {name: cell(base - 0.03 if better else 1.03 - base, 0.01) for name, better in metrics.items()}
    return {"version": version, "pooled": pooled, "silos": own}


def curves() -> dict[str, Any]:
    ends = np.linspace(0, 1, 200)
    spans = (np.arange(16) + 0.5) / 16
    return {
        "roc": [[float(x), float(x**0.2)] for x in ends],
        "calibration": [[float(x), float(x**1.3), int(300 * (1 - x) + 4)] for x in spans],
    }


def matrix(silos: Sequence[str], metrics: dict[str, bool]) -> dict[str, Any]:
    """A ``cross_site.json`` where local models travel; the last silo's own failed to train."""
    models = [{"subject": "last", "silo": None, "version": 12}, {"subject": "best", "silo": None, "version": 9}]
    models += [{"subject": subject, "silo": silo, "samples": 640} for subject in ("local", "tuned") for silo in silos]

    def row(model: dict[str, Any], better: bool) -> list[Cell | None]:
        values = [0.85 - 0.2 * (model["silo"] not in (None, silo)) - 0.01 * (at % 5) for at, silo in enumerate(silos)]
        return [
            None if model["silo"] == silos[-1] and model["subject"] == "local" else cell(value if better else 1 - value)
            for value in values
        ]

    return {
        "split": "test",
        "silos": list(silos),
        "models": models,
        "metrics": {
            name: {
                "higher_is_better": better,
                "matrix": [row(model, better) for model in models],
                "pooled": {subject: cell(0.8, 0.01) for subject in ("last", "best", "local", "tuned")},
                "gain": {
                    subject: {silo: None if silo == silos[-1] else cell(0.06, 0.05) for silo in silos}
                    for subject in ("last", "best", "tuned")
                },
            }
            for name, better in metrics.items()
        },
        "missing": [{"subject": "local", "silo": silos[-1], "reason": "it failed to train: training diverged"}],
    }


def add_results(folder: Path, silos: Sequence[str], metrics: dict[str, bool] | None = None, base: float = 0.9) -> None:
    """Put them beside the files of a finished run, and into its summary and rounds."""
    named = METRICS if metrics is None else metrics
    path = folder / "summary.json"
    summary = json.loads(path.read_text())
    found = {
        "higher_is_better": named,
        "validation": {"last": evaluated(silos, base - 0.01, 12, named)},
        "test": {"last": evaluated(silos, base - 0.02, 12, named), "best": evaluated(silos, base, 9, named)},
    }
    kept = {"version": 9, "metrics": {"auroc": 0.91}, "test": {"auroc": 0.87}, "digest": "b5" * 32}
    path.write_text(json.dumps({**summary, "evaluation": found, "best": kept}))
    drawn = {"test": {subject: {"curves": curves()} for subject in ("last", "best")}}
    (folder / "evaluation.json").write_text(json.dumps(drawn))
    (folder / "cross_site.json").write_text(json.dumps(matrix(silos, named)))
    rows = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    with (folder / "rounds.jsonl").open("w") as file:
        for row in rows:
            reached = base * (1 - np.exp(-5 * row["round"] / len(rows)))
            told = {silo: reached - 0.1 + 0.1 * index / len(silos) for index, silo in enumerate(silos)}
            row["evaluation"] = {
                "pooled": {name: reached if better else 1 - reached for name, better in named.items()},
                "silos": {
                    silo: {name: value if better else 1 - value for name, better in named.items()}
                    for silo, value in told.items()
                },
            }
            file.write(json.dumps(row) + "\n")
