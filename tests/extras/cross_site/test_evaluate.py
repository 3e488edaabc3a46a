"""``fedsync evaluate``: models of a run, or from elsewhere, on the test data of its silos."""

import json
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import yaml

from fedsync.common.errors import ConfigError, OwnerRefusal
from fedsync.config.cluster import ClusterConfig
from fedsync.config.run_spec import RunSpec
from fedsync.config.silo_start import SiloStartConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.orders import Evaluation
from fedsync.extras.cross_site.site_evaluation import sites_of_run
from fedsync.silo.owner.owner_policy import owner_environment
from fedsync.silo.protocol import STATE_FOLDER, Identity
from fedsync.simulation.run import run_virtual
from fedsync.train.local_trainer import GuardedTrainer
from tests.commands.call import call

CLUSTER = ClusterConfig.model_validate({"silos": [{"name": name, "speed": 100.0} for name in "ab"]})
RUN = ("stop.rounds=2", "local.steps=3", "task={kind: mlp, data: {kind: blobs, samples: 200}}")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    run_virtual(StrategyConfig.load("fedavg", RUN), CLUSTER, out)
    return out


def bare_run(folder: Path, *changes: str) -> None:
    config = StrategyConfig.load("fedavg", changes)
    (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    (folder / "silos.yaml").write_text(yaml.safe_dump({"silos": CLUSTER.entries()}))


def told(out: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(out.read_text())
    return document


def test_all_silos_of_a_run(run: Path) -> None:
    """What the run has measured of its last version is found again."""
    shown = call("evaluate", run)
    document = told(run / "evaluated.json")
    assert document["silos"] == ["a", "b"] and "evaluated.json" in shown
    lines = [line.split()[0] for line in shown.splitlines() if line.strip()]
    assert [line for line in lines if line in ("a", "b", "pooled")] == ["a", "b", "pooled"] * len(document["models"])
    row = [each["subject"] for each in document["models"]].index("last")
    summary = json.loads((run / "summary.json").read_text())
    pooled = document["metrics"]["accuracy"]["pooled"]["last"]["value"]
    assert pooled == pytest.approx(summary["accuracy"])
    cells = document["metrics"]["loss"]["matrix"][row]
    assert sum(cell["value"] * cell["support"]["samples"] for cell in cells) / sum(
        cell["support"]["samples"] for cell in cells
    ) == pytest.approx(summary["loss"])


@pytest.mark.slow
def test_many_metrics_leave_room_for_the_names_of_silos(tmp_path: Path) -> None:
    """Each in full: a table that is too wide would lose its first columns."""
    names = ("accuracy", "balanced_accuracy", "f1", "f1_macro", "auroc", "average_precision", "calibration_error")
    wide = f"evaluation={{metrics: [{', '.join(names)}]}}"
    cluster = ClusterConfig.model_validate({"silos": [{"name": "hospital-of-the-city", "speed": 100.0, "count": 2}]})
    run_virtual(StrategyConfig.load("fedavg", [*RUN, wide]), cluster, tmp_path)
    lines = call("evaluate", tmp_path).splitlines()
    assert not [line for line in lines if "…" in line]
    heads = [line.split() for line in lines if line.strip().startswith("silo ")]
    models = len(told(tmp_path / "evaluated.json")["models"])
    assert [name for head in heads for name in head[2:]] == [*told(tmp_path / "evaluated.json")["metrics"]] * models
    assert sum(line.strip().startswith("hospital-of-the-city") for line in lines) == 2 * len(heads)


@pytest.mark.parametrize("listed", [["silos=[b, a]"], ["silos=[z, a, b]", "min_silos=2"]], ids=["order", "absent"])
def test_silos_are_evaluated_on_the_data_that_the_run_gave_them(tmp_path: Path, listed: list[str]) -> None:
    """The places of the silo file count, also where the strategy lists its silos otherwise."""
    bare_run(tmp_path, *RUN, *listed)
    sites = sites_of_run(tmp_path, [])
    assert [(site.name, site.identity.index, site.spec.silos) for site in sites] == [("a", 0, 2), ("b", 1, 2)]


def test_private_tensors_are_those_of_the_file_and_of_a_run_untrained(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A head of zeros finds all five classes alike: its loss is log 5."""
    bare_run(tmp_path, *RUN, "model.private=['3.*']")
    state = torch.load(run / "model.pt", weights_only=True)
    zeros = {name: torch.zeros_like(tensor) if name.startswith("3.") else tensor for name, tensor in state.items()}
    torch.save(zeros, tmp_path / "zeros.pt")
    call("evaluate", tmp_path, "--model", tmp_path / "zeros.pt")
    cells = told(tmp_path / "evaluated.json")["metrics"]["loss"]["matrix"][0]
    assert [cell["value"] for cell in cells] == pytest.approx([math.log(5)] * 2)
    assert "private tensors (3.weight, 3.bias) are those of the model's file" in caplog.text


CLIENT_APP = """\
import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

def first():
    return ArrayRecord({"body": Array(np.zeros(2, np.float32)), "head": Array(np.zeros(2, np.float32))})

@app.train()
def fit(msg, context):
    metrics = {"num-examples": 4, "train_loss": 0.5}
    return Message(RecordDict({"arrays": msg.content["arrays"], "metrics": MetricRecord(metrics)}), reply_to=msg)

@app.evaluate()
def test(msg, context):
    head = float(msg.content["arrays"]["head"].numpy().sum())
    return Message(RecordDict({"metrics": MetricRecord({"num-examples": 4, "eval_loss": head})}), reply_to=msg)
"""


@pytest.mark.slow
def test_private_arrays_of_a_client_app_are_those_of_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "app.py").write_text(CLIENT_APP)
    task = f"task={{kind: clientapp, app: '{tmp_path}/app.py:app', model: '{tmp_path}/app.py:first'}}"
    bare_run(tmp_path, "stop.rounds=2", task, "model.private=[head]")
    torch.save({"body": torch.zeros(2), "head": torch.full((2,), 1.5)}, tmp_path / "trained.pt")
    call("evaluate", tmp_path, "--model", tmp_path / "trained.pt")
    cells = told(tmp_path / "evaluated.json")["metrics"]["loss"]["matrix"][0]
    assert [cell["value"] for cell in cells] == [3.0, 3.0]
    assert "private tensors (head) are those of the model's file" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("cipher", ["{kind: plain}", "{kind: bfv}"])
def test_columns_are_standardised_as_in_the_run(tmp_path: Path, cipher: str) -> None:
    """By what all silos found out before it, whichever of them are asked; and of both models of a sealed run too."""
    heart = Path(__file__).parents[3] / "examples" / "heart"
    config = StrategyConfig.load(
        heart / "strategy.yaml", ["stop.rounds=2", "task.standardise=federated", f"cipher={cipher}"]
    )
    summary = run_virtual(config, ClusterConfig.load(heart / "silos.yaml"), tmp_path)
    call("evaluate", tmp_path)
    pooled = told(tmp_path / "evaluated.json")["metrics"]["auroc"]["pooled"]
    for subject in ("best", "last"):
        assert pooled[subject]["value"] == pytest.approx(summary[subject]["test"]["auroc"], abs=1e-4)
    call("evaluate", tmp_path, "--silo", "va", "--out", tmp_path / "va.json")
    all_silos, one = (told(tmp_path / file)["metrics"]["loss"] for file in ("evaluated.json", "va.json"))
    assert one["matrix"] == [row[-1:] for row in all_silos["matrix"]]


def test_one_silo_and_a_model_from_elsewhere(run: Path, tmp_path: Path) -> None:
    state = torch.load(run / "model.pt", weights_only=True)
    torch.save({name: torch.zeros_like(tensor) for name, tensor in state.items()}, tmp_path / "theirs.pt")
    shown = call("evaluate", run, "--silo", "b", "--model", tmp_path / "theirs.pt", "--out", tmp_path / "x.json")
    document = told(tmp_path / "x.json")
    assert document["silos"] == ["b"] and "file model" in shown
    assert document["models"] == [{"subject": "file", "silo": None, "file": str(tmp_path / "theirs.pt")}]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda state, name: state.pop(name), r"'{name}' is missing"),
        (lambda state, name: state.update({name: torch.zeros(1, 7)}), r"'{name}' has the shape \[1, 7\]"),
        (lambda state, name: state.update({name: state[name] / 0}), r"'{name}' has values that are not finite"),
        (lambda state, name: state.update(extra=torch.zeros(2)), r"'extra' is not in the task's model"),
    ],
    ids=["missing", "shape", "infinite", "strange"],
)
def test_a_model_that_does_not_fit_names_the_tensor(run: Path, tmp_path: Path, change: Any, problem: str) -> None:
    state = torch.load(run / "model.pt", weights_only=True)
    name = next(iter(state))
    change(state, name)
    torch.save(state, tmp_path / "odd.pt")
    with pytest.raises(ConfigError, match=problem.format(name=name.replace(".", r"\."))):
        call("evaluate", run, "--model", tmp_path / "odd.pt")


def test_a_silo_whose_metric_is_not_finite_is_left_out(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def judge(*words: Any, **more: Any) -> Evaluation:
        found = honest(*words, **more)
        return replace(found, sums=dict.fromkeys(found.sums, (math.nan,))) if words[0]._trainer._name == "a" else found

    honest = GuardedTrainer.judge
    monkeypatch.setattr(GuardedTrainer, "judge", judge)
    call("evaluate", run, "--out", tmp_path / "x.json")
    assert [cell is None for cell in told(tmp_path / "x.json")["metrics"]["loss"]["matrix"][0]] == [True, False]
    assert "silo 'a' failed the check 'statistics'" in caplog.text and "are not finite" in caplog.text
    with pytest.raises(ConfigError, match="no model here, or no usable evaluation"):
        call("evaluate", run, "--silo", "a")


def test_what_cannot_be_meant(run: Path, tmp_path: Path) -> None:
    for words, problem in (
        ([run, "--silo", "c"], "no silo 'c'"),
        ([tmp_path / "nosuchrun"], "nosuchrun: no run: config"),
        ([], "neither a run nor"),
        ([run, "--model", run / "summary.json"], "not a state dict"),
        ([run, "--out", tmp_path / "nowhere" / "x.json"], "no folder"),
    ):
        with pytest.raises(ConfigError, match=problem):
            call("evaluate", *words)
            pytest.fail(problem)


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A silo's state folder, whose path may not be long; what the silo's owner allows is forgotten in the end."""
    with TemporaryDirectory() as folder:
        config = SiloStartConfig(name="b", server="localhost:1", insecure=True, state=folder)
        for name in owner_environment(config):
            monkeypatch.setenv(name, "")
        yield Path(folder)


@pytest.mark.slow
def test_a_real_silo_evaluates_on_its_own_data(run: Path, tmp_path: Path, state: Path) -> None:
    """Which share of the data it has, its trainer's folder says."""
    file = tmp_path / "silo.yaml"
    file.write_text(yaml.safe_dump({"name": "b", "server": "localhost:1", "insecure": True, "state": str(state)}))
    with pytest.raises(ConfigError, match="no run has files"):
        call("evaluate", "--silo", file, "--model", run / "model.pt")
    spec = RunSpec.of(StrategyConfig.load("fedavg", RUN), None, 2)
    other = RunSpec.of(StrategyConfig.load("fedavg", [*RUN, "task.data.samples=400"]), None, 2)
    took_part(state, other.model_copy(update={"run": "older"}), share=1, at_s=1000)
    took_part(state, spec.model_copy(update={"run": "newest"}), share=1, at_s=2000)
    with pytest.raises(ConfigError, match="no model here"):
        call("evaluate", "--silo", file)
    call("evaluate", run)
    there = [told(run / "evaluated.json")["metrics"]["loss"]["matrix"][0][1:]]
    out, at = tmp_path / "x.json", ("--silo", file, "--model", run / "model.pt")
    for named, newest in (((), True), (("--run", "older"), False), (("--run", "newest"), True)):
        call("evaluate", *at, *named, "--out", out)
        assert told(out)["silos"] == ["b"] and (told(out)["metrics"]["loss"]["matrix"] == there) == newest
    with pytest.raises(ConfigError, match="no run 'other' was here"):
        call("evaluate", *at, "--run", "other")


def took_part(state: Path, spec: RunSpec, share: int, at_s: float) -> None:
    folder = state / STATE_FOLDER / (spec.run or "run")
    folder.mkdir(parents=True)
    Identity(spec.dump(), share, "b").save(folder)
    os.utime(folder, (at_s, at_s))


@pytest.mark.parametrize(("linked", "why"), [(False, "data"), (True, r"rows\.csv")])
def test_what_the_owner_closed_stays_closed(run: Path, tmp_path: Path, state: Path, *, linked: bool, why: str) -> None:
    """The run names a file that is not below the folders of silo.yaml, or a hard link below them to a closed one."""
    file, mine = tmp_path / "silo.yaml", tmp_path / "mine"
    rows = state / "kept.csv" if linked else tmp_path / "closed.csv"
    rows.write_text("x,y\n1,0\n2,1\n" * 20)
    mine.mkdir()
    if linked:
        os.link(rows, mine / "rows.csv")
        rows = mine / "rows.csv"
    task = json.dumps({"kind": "csv", "files": [str(rows)], "target": "y"})
    took_part(state, RunSpec.of(StrategyConfig.load("fedavg", [f"task={task}"]), None, 1), share=0, at_s=1000)
    silo = {"name": "b", "server": "localhost:1", "insecure": True, "state": str(state), "data": [str(mine)]}
    file.write_text(yaml.safe_dump(silo))
    with pytest.raises(OwnerRefusal, match=why):
        call("evaluate", "--silo", file, "--model", run / "model.pt")
