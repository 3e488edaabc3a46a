"""The survival example by its README's commands, beside statsmodels on the pooled table."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from statsmodels.duration.hazard_regression import PHReg
from statsmodels.duration.survfunc import survdiff

from tests.examples.reader import FOLDER, carry_out, commands


@pytest.mark.slow
@pytest.mark.parametrize("name", ["survival"])
def test_the_analysis_is_near_that_of_the_pooled_table(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = (example / "README.md").read_text(encoding="utf-8")
    carry_out(commands(example)["analysis"], monkeypatch)
    (shown,) = re.findall(r"^fedsync (survival runs.*)$", readme, re.MULTILINE)
    carry_out([*shlex.split(shown), "--out", "found.json"], monkeypatch)
    found: dict[str, Any] = json.loads(Path("found.json").read_text())

    pooled = pd.concat([pd.read_csv(file) for file in sorted((example / "data").glob("*.csv"))])
    known = pooled.dropna()
    inputs = [known["age"], known["treatment"] == "new", known["stage"] == "II", known["stage"] == "III"]
    fit = PHReg(known["months"], np.stack(inputs, axis=1).astype(float), known["relapse"], ties="efron").fit()
    rows = found["cox"]["covariates"]
    differences = np.abs([each["coefficient"] for each in rows] - fit.params) / fit.bse
    assert differences.max() < 0.05, "README says a twentieth of the error"
    for each in rows:
        numbers = (f"{each['coefficient']:.4f}", f"{each['error']:.4f}", f"{each['ratio']:.3f}")
        assert f"| {each['covariate']} | {' | '.join(numbers)} |" in readme
    statistic, _ = survdiff(pooled["months"].to_numpy(), pooled["relapse"].to_numpy(), pooled["treatment"].to_numpy())
    assert f"chi-squared {found['log_rank']['statistic']:.2f}" in readme and f"gives {statistic:.2f}" in readme


@pytest.mark.slow
@pytest.mark.parametrize("name", ["survival"])
def test_the_model_puts_patients_in_order(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    carry_out(commands(example)["model"], monkeypatch)
    assert json.loads(Path("runs/model/summary.json").read_text())["accuracy"] > 0.57


@pytest.mark.slow
def test_the_data_are_those_that_the_script_makes(tmp_path: Path) -> None:
    script = tmp_path / "make_data.py"
    script.write_text((FOLDER / "survival" / "make_data.py").read_text())
    (tmp_path / "data").mkdir()
    subprocess.run([sys.executable, str(script)], check=True, timeout=60)
    for file in (FOLDER / "survival" / "data").glob("*.csv"):
        assert (tmp_path / "data" / file.name).read_bytes() == file.read_bytes()
