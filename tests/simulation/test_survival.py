"""Survival analysis over sealed sums equals the analysis of pooled rows by other libraries."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from statsmodels.duration.hazard_regression import PHReg
from statsmodels.duration.survfunc import SurvfuncRight, survdiff

from fedsync.cli import main
from fedsync.common.errors import ConfigError, RunError
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.extras.survival.survival_estimates import cox_fit, kaplan_meier, log_rank
from fedsync.extras.survival.survival_results import result_of_run
from fedsync.extras.survival.survival_sums import SurvivalForm, SurvivalSums, read_survival
from fedsync.simulation.run import run_virtual
from tests.commands.call import call

CIPHERS = ["{kind: plain}", "{kind: bfv, members: 4}", "{kind: masked, inner: {kind: bfv, members: 4}}"]
CLUSTER = ClusterConfig.model_validate({"silos": [{"name": name, "speed": 100.0} for name in ("a", "b", "c", "d")]})


def made(seed: int = 3, rows: int = 240) -> pd.DataFrame:
    """Patients whose times have ties, whose hospitals differ, and of whom some cells are missing."""
    rng = np.random.default_rng(seed)
    site = rng.choice(4, rows, p=[0.4, 0.3, 0.2, 0.1])
    age, arm = np.round(rng.normal(60 + 3 * site, 9)), rng.integers(0, 2, rows)
    stage = rng.choice(["i", "ii", "iii"], rows)
    hazard = np.exp(0.04 * (age - 60) - 0.6 * arm + 0.5 * (stage == "iii"))
    time, end = rng.exponential(300 / hazard), rng.uniform(100, 900, rows)
    frame = pd.DataFrame(
        {"site": site, "days": np.ceil(np.minimum(time, end) / 7) * 7, "dead": (time <= end).astype(int)}
    )
    frame = frame.assign(age=age, arm=np.where(arm == 1, "new", "old"), stage=stage)
    frame.loc[rng.random(rows) < 0.05, "age"] = np.nan
    return frame


def asked(
    frame: pd.DataFrame, folder: Path, grid: Any, covariates: list[str], least: int = 1, **task: Any
) -> list[str]:
    """Overrides of `bsp` for the analysis of a frame, one file a silo."""
    files = [str(folder / f"{site}.csv") for site in range(4)]
    for site, file in enumerate(files):
        frame[frame["site"] == site].drop(columns="site").to_csv(file, index=False)
    of = {"kind": "csv", "files": files, "target": "dead", "time": "days", "statistics": {"least": least}}
    of |= {"columns": {"arm": {"categories": ["old", "new"]}, "stage": {"categories": ["i", "ii", "iii"]}}}
    survival = {"grid": grid, "group": "arm", "covariates": covariates}
    whole = {"kind": "survey", "of": {**of, **task}, "survival": survival}
    fixed = ["barrier={kind: bsp, complete: true}", "aggregation={kind: fedavg, weight: silo}"]
    rounds = 7 if covariates else 1
    return [
        f"task={json.dumps(whole)}",
        f"stop={{rounds: {rounds}}}",
        "evaluation={metrics: []}",
        "min_silos=4",
        *fixed,
    ]


def sums_of(sets: list[str], folder: Path) -> tuple[SurvivalForm, SurvivalSums]:
    from fedsync.train.weights import load_model

    config = StrategyConfig.load("bsp", sets)
    run_virtual(config, CLUSTER, folder)
    form = config.task.survival.form(config.task.of, 4)  # type: ignore[union-attr]
    sums = read_survival(form, load_model(folder / "model.pt", form.layout, set(form.layout.names)))
    assert sums is not None and sums.silos == 4
    return form, sums


def pooled_cox(frame: pd.DataFrame) -> Any:
    known = frame.dropna(subset=["age"])
    inputs = np.stack(
        [known["age"], known["arm"] == "new", known["stage"] == "ii", known["stage"] == "iii"], axis=1
    ).astype(float)
    return PHReg(known["days"], inputs, known["dead"], ties="efron").fit()


@pytest.mark.slow
@pytest.mark.parametrize("cipher", CIPHERS)
def test_with_all_times_in_the_grid_it_is_that_of_the_pooled_rows(cipher: str, tmp_path: Path) -> None:
    frame = made()
    grid = sorted(set(frame["days"]))
    form, sums = sums_of([*asked(frame, tmp_path, grid, ["age", "arm", "stage"]), f"cipher={cipher}"], tmp_path / "run")
    assert form.covariates == ("age", "arm new", "stage ii", "stage iii")

    expected, fit = pooled_cox(frame), cox_fit(form, sums)
    assert fit.converged and fit.steps == 6
    np.testing.assert_allclose(fit.coefficients, expected.params, atol=1e-6)
    np.testing.assert_allclose(fit.errors, expected.bse, atol=1e-6)
    assert fit.likelihood == pytest.approx(expected.llf, abs=1e-6)

    curve, whole = kaplan_meier(sums.counts.sum(axis=0)), SurvfuncRight(frame["days"], frame["dead"])
    at = np.searchsorted(grid, whole.surv_times)
    np.testing.assert_allclose(curve.survival[at], whole.surv_prob, atol=1e-12)
    np.testing.assert_array_equal(curve.at_risk[at], whole.n_risk)

    statistic, p = survdiff(frame["days"].to_numpy(), frame["dead"].to_numpy(), frame["arm"].to_numpy())
    test = log_rank(sums.counts)
    assert (test.statistic, test.p, test.degrees) == (pytest.approx(statistic), pytest.approx(p), 1)


def test_lung_as_lifelines_has_it(tmp_path: Path) -> None:
    """The hospitals are those of the column ``inst``, four groups of them."""
    lifelines = pytest.importorskip("lifelines")
    from lifelines.datasets import load_lung
    from lifelines.statistics import logrank_test

    lung = load_lung().dropna(subset=["inst"])
    frame = pd.DataFrame({"site": lung["inst"].astype(int) % 4, "days": lung["time"], "dead": lung["status"]})
    frame = frame.assign(arm=np.where(lung["sex"] == 2, "new", "old"), age=lung["age"], ecog=lung["ph.ecog"])
    grid = sorted(map(float, set(frame["days"])))
    sets = asked(frame.assign(stage="i"), tmp_path, grid, ["age", "arm", "ecog"])
    form, sums = sums_of([*sets, "cipher={kind: bfv}"], tmp_path / "run")
    told = frame.assign(arm=(frame["arm"] == "new").astype(int)).drop(columns="site").dropna()
    cox = lifelines.CoxPHFitter().fit(told, "days", "dead")
    np.testing.assert_allclose(cox_fit(form, sums).coefficients, cox.params_[["age", "arm", "ecog"]], atol=1e-3)
    np.testing.assert_allclose(cox_fit(form, sums).errors, cox.standard_errors_[["age", "arm", "ecog"]], atol=1e-3)
    whole, curve = (
        lifelines.KaplanMeierFitter().fit(frame["days"], frame["dead"]),
        kaplan_meier(sums.counts.sum(axis=0)),
    )
    np.testing.assert_allclose(curve.survival, whole.survival_function_at_times(grid), atol=1e-3)
    ends = whole.confidence_interval_.loc[grid[:-1]].to_numpy()
    np.testing.assert_allclose(np.stack([curve.low, curve.high], axis=1)[:-1], ends, atol=1e-3)
    new, old = (frame[frame["arm"] == arm] for arm in ("new", "old"))
    test = logrank_test(new["days"], old["days"], new["dead"], old["dead"])
    assert log_rank(sums.counts).statistic == pytest.approx(test.test_statistic, abs=1e-3)


@pytest.mark.slow
def test_people_see_no_line_that_tells_of_few_persons(tmp_path: Path) -> None:
    frame = made()
    sets = asked(frame, tmp_path, {"every": 30, "until": 1000}, ["age", "arm"], least=5)
    run_virtual(StrategyConfig.load("bsp", [*sets, "cipher={kind: bfv}"]), CLUSTER, tmp_path / "run")
    found = result_of_run(tmp_path / "run")
    assert [curve["group"] for curve in found["curves"]] == ["all", "old", "new"]
    for curve in found["curves"][1:]:
        rows, since = frame[frame["arm"] == curve["group"]], 0.0
        assert curve["persons"] == len(rows) and len(curve["times"]) > 2
        for time, left in zip(curve["times"], curve["left"], strict=True):
            between = rows[(rows["days"] > since) & (rows["days"] <= time)]
            counts = [(between["dead"] == 1).sum(), (between["dead"] == 0).sum(), (rows["days"] > time).sum()]
            assert all(count == 0 or count >= 5 for count in counts)
            assert left == counts[2]
            since = time
    assert found["cox"]["converged"] and found["log_rank"]["degrees"] == 1


@pytest.mark.slow
def test_a_coarse_grid_and_cells_of_five_persons_cost_less_than_a_standard_error(tmp_path: Path) -> None:
    frame = made()
    expected, whole = pooled_cox(frame), SurvfuncRight(frame["days"], frame["dead"])
    every = 30.0
    sets = asked(frame, tmp_path, {"every": every, "until": 1000}, ["age", "arm", "stage"], least=5)
    form, sums = sums_of([*sets, "cipher={kind: bfv}"], tmp_path / "run")
    assert (np.abs(cox_fit(form, sums).coefficients - expected.params) < 0.5 * expected.bse).all()
    curve = kaplan_meier(sums.counts.sum(axis=0))
    last = np.searchsorted(whole.surv_times, form.grid, side="right") - 1
    exact = np.where(last >= 0, whole.surv_prob[np.maximum(last, 0)], 1.0)
    np.testing.assert_allclose(curve.survival, exact, atol=0.02)


def test_the_command_shows_it_and_writes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = asked(made(), tmp_path, {"every": 60, "until": 900}, ["age"], least=5)
    run_virtual(StrategyConfig.load("bsp", sets), CLUSTER, tmp_path / "run")
    out = tmp_path / "survival.json"
    monkeypatch.setattr("sys.argv", ["fedsync", "survival", str(tmp_path / "run"), "--out", str(out)])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    shown = capsys.readouterr().out
    assert "Survival, new" in shown and "Log-rank test" in shown and "hazard ratio" in shown
    assert json.loads(out.read_text()) == result_of_run(tmp_path / "run")


def test_a_run_is_named_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--run: DIR already names the run"):
        call("survival", tmp_path, "--run", "older")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stop.rounds=6", "takes 7 rounds"),
        ("aggregation.weight=examples", "weight: silo"),
        ("barrier.complete=false", "complete: true"),
        ("cipher={kind: bfv, bits: 8}", "sums of 16 bits"),
        ("cipher={kind: bfv, members: 1}", "two silos"),
        ("task.of.time=null", "Write of.time"),
        ("task.survival.group=age", "has no categories"),
        ("task.survival.covariates=[dead]", "which is the target"),
        ("task.survival.grid=[3, 2]", "do not increase"),
    ],
)
def test_a_run_that_cannot_add_up_is_refused_before_it_begins(override: str, message: str, tmp_path: Path) -> None:
    sets = asked(made(), tmp_path, {"every": 60, "until": 900}, ["age"])
    with pytest.raises(ConfigError, match=message):
        StrategyConfig.load("bsp", [*sets, override])


def test_too_few_censored_persons_are_not_summed(tmp_path: Path) -> None:
    frame = made()
    frame["dead"] = (np.arange(len(frame)) >= 4).astype(int)
    sets = asked(frame, tmp_path, {"every": 60, "until": 2000}, ["age"], least=5)
    with pytest.raises((ConfigError, RunError), match="fewer than 5 censored persons"):
        run_virtual(StrategyConfig.load("bsp", sets), CLUSTER, tmp_path / "run")
