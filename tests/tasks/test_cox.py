"""The Cox loss is that of statsmodels, and a table with times trains by it."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from statsmodels.duration.hazard_regression import PHReg

from fedsync.common.errors import ConfigError
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.extras.survival.cox import CoxTask, partial_loss
from fedsync.simulation.run import run_virtual
from fedsync.tasks.task_protocol import SiloSlot

CLUSTER = ClusterConfig.model_validate({"silos": [{"name": "a", "speed": 100.0}, {"name": "b", "speed": 300.0}]})


def made(rows: int = 300, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    age, dose = rng.normal(60, 10, rows), rng.normal(size=rows)
    time, end = rng.exponential(100 / np.exp(0.08 * (age - 60) - 0.7 * dose)), rng.uniform(20, 400, rows)
    frame = pd.DataFrame({"age": age.round(3), "dose": dose.round(3), "days": np.ceil(np.minimum(time, end))})
    return frame.assign(dead=(time <= end).astype(int))


def slot() -> SiloSlot:
    return SiloSlot("a", 0, 1, seed=1)


def task(folder: Path, frame: pd.DataFrame, **options: object) -> CoxTask:
    frame.to_csv(folder / "a.csv", index=False)
    return CoxTask("days", files=(str(folder / "a.csv"),), target="dead", **options)


@pytest.mark.parametrize("coefficients", [(0.0, 0.0), (0.05, -0.4), (-2.0, 30.0)])
def test_the_loss_is_the_partial_likelihood_with_ties(coefficients: tuple[float, float]) -> None:
    frame = made(80)
    frame["days"] = np.ceil(frame["days"] / 40)
    assert frame["days"].nunique() < 12, "ties"
    inputs = frame[["age", "dose"]].to_numpy()
    expected = PHReg(frame["days"], inputs, frame["dead"], ties="efron").loglike(np.array(coefficients))
    risk = torch.tensor(inputs @ np.array(coefficients), requires_grad=True)
    loss = partial_loss(risk, torch.tensor(frame["days"].to_numpy()), torch.tensor(frame["dead"].to_numpy()))
    loss.backward()
    assert loss.item() == pytest.approx(-expected, rel=1e-9)
    assert float(risk.grad.sum()) == pytest.approx(0.0, abs=1e-9), "a common factor of all hazards changes nothing"


def test_by_hand() -> None:
    # Times 1, 2, 2, 3 and no event at 3: ln(1 + 2 + 4 + 1) - ln 1, then both at 2: ln(7) + ln(7 - 3) - ln(2 * 4).
    risk = torch.log(torch.tensor([1.0, 2.0, 4.0, 1.0]))
    loss = partial_loss(risk, torch.tensor([1.0, 2.0, 2.0, 3.0]), torch.tensor([1.0, 1.0, 1.0, 0.0]))
    assert float(loss) == pytest.approx(np.log(8) + np.log(7) + np.log(7 - 6 / 2) - np.log(8), rel=1e-6)
    risk = torch.zeros(3, requires_grad=True)
    partial_loss(risk, torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3)).backward()
    assert not risk.grad.any(), "a batch without events"


def test_data_model_and_score(tmp_path: Path) -> None:
    made_task = task(tmp_path, made(), test_share=0.2)
    data = made_task.data(slot())
    inputs, targets = data.train.tensors  # type: ignore[attr-defined]
    assert inputs.shape[1] == 2 and targets.shape == (len(data.train), 2)  # type: ignore[arg-type]
    assert made_task.model().out_features == 1
    assert {one.name for one in made_task.table(slot())} == {"age", "days", "dead", "dose"}
    times, events = targets.unbind(1)
    censored_then = (times[:, None] == times) & (events == 0)
    assert (censored_then & (events[:, None] > 0)).any(), "a row that is censored at the time of an event lived longer"
    later = ((times[:, None] < times) | censored_then) & (events[:, None] > 0)
    age = inputs[:, 0]
    share = (((age[:, None] > age) & later).sum() + ((age[:, None] == age) & later).sum() / 2) / later.sum()
    assert float(made_task.assess(inputs[:, :1], targets)[1] / len(targets)) == pytest.approx(float(share), abs=1e-6)


@pytest.mark.parametrize(("column", "cell", "message"), [("days", 0, "above 0"), ("days", np.nan, "missing"),
                                                          ("dead", 2, "classes 0 to 1")])  # fmt: skip
def test_wrong_rows_are_named(column: str, cell: float, message: str, tmp_path: Path) -> None:
    frame = made()
    frame.loc[7, column] = cell
    with pytest.raises(ConfigError, match=message) as error:
        task(tmp_path, frame).data(slot())
    assert "line 9" in error.value.place


@pytest.mark.slow
@pytest.mark.parametrize(("model", "cipher"), [("logistic", "plain"), ("logistic", "bfv"), ("mlp", "plain")])
def test_it_trains_to_the_pooled_coefficients(model: str, cipher: str, tmp_path: Path) -> None:
    frame = made(600)
    files = [str(tmp_path / "a.csv"), str(tmp_path / "b.csv")]
    for file, part in zip(files, (frame[:200], frame[200:]), strict=True):
        part.to_csv(file, index=False)
    asked = {"kind": "csv", "files": files, "target": "dead", "time": "days", "model": model, "test_share": 0.2}
    asked["standardise"] = {"age": [60, 10], "dose": [0, 1]}
    local = "local={steps: 5, batch_size: 64, learning_rate: 0.5}"
    sets = [f"task={json.dumps(asked)}", local, "stop={rounds: 12}", f"cipher={{kind: {cipher}}}"]
    summary = run_virtual(StrategyConfig.load("lb-bsp", sets), CLUSTER, tmp_path / "run")
    assert summary["accuracy"] > 0.72
    if model == "logistic":
        found = torch.load(tmp_path / "run" / "model.pt", weights_only=True)["weight"].numpy()[0]
        pooled = PHReg(frame["days"], frame[["age", "dose"]].to_numpy() / [10, 1], frame["dead"], ties="efron").fit()
        np.testing.assert_allclose(found, pooled.params, atol=3 * float(pooled.bse.max()))


def test_a_private_run_is_refused(tmp_path: Path) -> None:
    asked = {"kind": "csv", "files": ["a.csv", "b.csv"], "target": "dead", "time": "days"}
    asked["standardise"] = {"age": [60, 10], "dose": [0, 1]}
    private = "privacy={kind: dp-sgd, clip: 1.0, noise_multiplier: 1.0}"
    with pytest.raises(ConfigError, match="a Cox loss compares rows"):
        StrategyConfig.load("bsp", [f"task={json.dumps(asked)}", private])
