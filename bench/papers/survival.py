"""Survival analysis over encrypted sums beside lifelines on the pooled table, by grid and by smallest cell.

    pip install --no-deps --target /tmp/lifelines lifelines autograd autograd-gamma formulaic interface_meta wrapt
    PYTHONPATH=/tmp/lifelines python bench/papers/survival.py [--quick] [--out FILE.json]

The data are lifelines' ``lung`` (Loprinzi et al. 1994), with the institutions in four silos. lifelines asks for a
pandas below 3, so it cannot be installed with FedSync; the parts used here work with newer ones.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd

from bench.common import print_table, write_json
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.config.tasks.survival_task import SurveyConfig
from fedsync.extras.survival.survival_estimates import cox_fit, kaplan_meier, log_rank
from fedsync.extras.survival.survival_sums import read_survival
from fedsync.simulation.run import run_virtual
from fedsync.train.weights import load_model

SILOS = ClusterConfig.model_validate({"silos": [{"name": f"silo-{number}", "speed": 100} for number in range(4)]})
COVARIATES = ["age", "sex", "ecog", "loss"]


def strategy(files: list[str], grid: Any, least: int) -> StrategyConfig:
    of = {"kind": "csv", "files": files, "target": "dead", "time": "days", "statistics": {"least": least}}
    of |= {"columns": {"arm": {"categories": ["man", "woman"]}}}
    survival = {"grid": grid, "group": "arm", "covariates": COVARIATES}
    sets = ["stop={rounds: 7}", "min_silos=4", "evaluation={metrics: []}", "barrier={kind: bsp, complete: true}"]
    sets += ["aggregation={kind: fedavg, weight: silo}", "cipher={kind: bfv, members: 4}"]
    task = {"kind": "survey", "of": of, "survival": survival}
    return StrategyConfig.load("bsp", [*sets, f"task={json.dumps(task)}"])


def row_of(frame: pd.DataFrame, files: list[str], grid: Any, least: int, out: Path) -> dict[str, float]:
    """Largest differences to lifelines on the pooled table, and the log-rank statistic."""
    from lifelines import CoxPHFitter, KaplanMeierFitter
    from lifelines.statistics import logrank_test

    config = strategy(files, grid, least)
    run_virtual(config, SILOS, out)
    assert isinstance(config.task, SurveyConfig) and config.task.survival is not None
    form = config.task.survival.form(config.task.of, 4)
    sums = read_survival(form, load_model(out / "model.pt", form.layout, set(form.layout.names)))
    if sums is None:
        raise SystemExit("the run has left no sums")
    cox = CoxPHFitter().fit(frame[["days", "dead", *COVARIATES]].dropna(), "days", "dead")
    whole = KaplanMeierFitter().fit(frame["days"], frame["dead"])
    women = frame["arm"] == "woman"
    test = logrank_test(frame["days"][women], frame["days"][~women], frame["dead"][women], frame["dead"][~women])
    fit, curve = cox_fit(form, sums), kaplan_meier(sums.counts.sum(axis=0))
    differences = np.abs(fit.coefficients - cox.params_[COVARIATES].to_numpy())
    return {
        "coefficient": float(differences.max()),
        "errors": float((differences / cox.standard_errors_[COVARIATES].to_numpy()).max()),
        "curve": float(np.abs(curve.survival - whole.survival_function_at_times(list(form.grid)).to_numpy()).max()),
        "log_rank": log_rank(sums.counts).statistic,
        "lifelines": float(test.test_statistic),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two grids")
    parser.add_argument("--out", type=Path, default=Path("bench/results/survival.json"))
    args = parser.parse_args()
    from lifelines.datasets import load_lung

    lung = load_lung().dropna(subset=["inst"])
    frame = pd.DataFrame({"days": lung["time"], "dead": lung["status"], "age": lung["age"], "sex": lung["sex"]})
    frame = frame.assign(ecog=lung["ph.ecog"], loss=lung["wt.loss"], arm=np.where(lung["sex"] == 2, "woman", "man"))
    distinct = sorted(map(float, set(frame["days"])))
    grids = {"all distinct times": (distinct, 1), "30 days": ({"every": 30, "until": 1022}, 5)}
    if not args.quick:
        grids |= {f"{every} days": ({"every": every, "until": 1022}, 5) for every in (1, 7, 91)}
        grids |= {"30 days, cells of 1": ({"every": 30, "until": 1022}, 1)}
    cells = []
    with TemporaryDirectory() as folder:
        files = [f"{folder}/{number}.csv" for number in range(4)]
        for number, file in enumerate(files):
            frame[lung["inst"].astype(int) % 4 == number].to_csv(file, index=False)
        for at, (name, (grid, least)) in enumerate(grids.items()):
            found = row_of(frame, files, grid, least, Path(folder) / f"run-{at}")
            cells.append({"grid": name, "least": least, **found})
            print(cells[-1], flush=True)
    columns = ["grid", "least", "coefficient", "in errors", "curve", "log-rank", "lifelines"]
    shown = []
    for each in cells:
        differences = [f"{each[key]:.1e}" for key in ("coefficient", "errors", "curve")]
        statistics = [f"{each[key]:.4f}" for key in ("log_rank", "lifelines")]
        shown.append([each["grid"], str(each["least"]), *differences, *statistics])
    print_table("Largest differences to lifelines on the pooled table", columns, shown)
    write_json(args.out, {"persons": len(frame), "cells": cells})


if __name__ == "__main__":
    main()
