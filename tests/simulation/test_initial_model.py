"""A run that begins with the model of an earlier one, however it is run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord

from fedsync.common.errors import ConfigError
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.flower.flower_strategy import FedSync
from fedsync.simulation.run import run_virtual
from tests.flower.grid import DirectGrid
from tests.flower.test_start import MODEL, TASK, TIMING

pytestmark = pytest.mark.usefixtures("silos_here")

CLUSTER = ClusterConfig.model_validate({"silos": [{"name": name, "speed": 400.0} for name in "ab"]})
SCAFFOLD = ["server_optimizer={kind: scaffold}", "aggregation={kind: fednova}"]


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("earlier")
    run_virtual(StrategyConfig.load("bsp", ["stop.rounds=8"]), CLUSTER, out)
    return out


def scores(out: Path) -> list[float]:
    """Of the models that silos were sent: that of the first is of the model that the run began with."""
    rows = [json.loads(line) for line in (out / "journal.jsonl").read_text().splitlines()[1:]]
    found = [event["report"]["evaluation"] for row in rows for event in row["events"] if "report" in event]
    return [each["correct"] / each["samples"] for each in found]


def final_score(out: Path) -> float:
    return float(json.loads((out / "summary.json").read_text())["accuracy"])


@pytest.mark.slow
@pytest.mark.parametrize("extra", [[], ["cipher={kind: pad}"], ["cipher={kind: masked}"], SCAFFOLD], ids=len)
def test_it_goes_on_where_the_other_ended(extra: list[str], earlier: Path, tmp_path: Path) -> None:
    three = ClusterConfig.model_validate({"silos": [{"name": name, "speed": 400.0} for name in "abc"]})
    config = StrategyConfig.load("bsp", ["stop.rounds=2", f"initial_model={earlier / 'last.pt'}", *extra])
    summary = run_virtual(config, three, tmp_path)
    assert summary["accuracy"] >= final_score(earlier) - 0.05
    without = run_virtual(StrategyConfig.load("bsp", ["stop.rounds=2", *extra]), three, tmp_path / "without")
    assert summary["accuracy"] > without["accuracy"]


def test_the_first_model_is_that_of_the_file(earlier: Path, tmp_path: Path) -> None:
    config = StrategyConfig.load("bsp", ["stop.rounds=1", f"initial_model={earlier / 'last.pt'}"])
    run_virtual(config, CLUSTER, tmp_path / "virtual")
    strategy = FedSync(config, CLUSTER, out=tmp_path / "flower", timing=TIMING)
    strategy.start(DirectGrid(2))
    virtual, flower = scores(tmp_path / "virtual"), scores(tmp_path / "flower")
    assert sorted(virtual[:2]) == sorted(flower[:2]) and min(virtual) > 0.5


def test_a_model_with_tied_weights_goes_on_too(tmp_path: Path) -> None:
    (tmp_path / "tied.py").write_text(MODEL + TASK)
    options, files = ["stop.rounds=1", f"task={{kind: custom, file: {tmp_path / 'tied.py'}}}"], tmp_path / "first"
    run_virtual(StrategyConfig.load("bsp", options), CLUSTER, files)
    options.append(f"initial_model={files / 'last.pt'}")
    assert run_virtual(StrategyConfig.load("bsp", options), CLUSTER, tmp_path / "second")["rounds"] == 1


@pytest.mark.slow
def test_initial_arrays_go_before_the_file_and_a_run_that_goes_on_needs_none(earlier: Path, tmp_path: Path) -> None:
    model = tmp_path / "model.pt"
    model.write_bytes((earlier / "last.pt").read_bytes())
    (tmp_path / "run.yaml").write_text(
        "name: further\nstop: {rounds: 2}\nbalancer: {kind: fixed}\nbarrier: {kind: bsp}\ntask: {kind: digits}\n"
        "initial_model: model.pt\n"
    )
    config = StrategyConfig.load(tmp_path / "run.yaml")
    assert config.initial_model == str(model)
    with pytest.raises(KeyboardInterrupt):
        FedSync(config, CLUSTER, out=tmp_path / "out", timing=TIMING).start(DirectGrid(2), evaluate_fn=_dies_later)
    first: list[Any] = []
    zeros = {name: torch.zeros_like(each) for name, each in torch.load(model, weights_only=True).items()}
    FedSync(config, CLUSTER, out=tmp_path / "zeros", timing=TIMING).start(
        DirectGrid(2),
        ArrayRecord(zeros),  # type: ignore[arg-type]
        evaluate_fn=lambda version, arrays: first.append(arrays),  # type: ignore[func-returns-value]
    )
    assert all(not each.numpy().any() for each in first[0].values())
    model.unlink()
    resumed = FedSync(config, CLUSTER, out=tmp_path / "out", timing=TIMING, resume=True).start(DirectGrid(2))
    assert resumed.summary["rounds"] == 2


def _dies_later(version: int, arrays: object) -> None:
    if version == 1:
        raise KeyboardInterrupt


@pytest.mark.parametrize("runs", ["virtual", "flower"])
def test_frozen_tensors_of_another_model_are_refused(runs: str, earlier: Path, tmp_path: Path) -> None:
    """No silo would load them: the run would train, and score, a model with the task's."""
    share = "model={share: ['*.bias']}"
    config = StrategyConfig.load("bsp", ["stop.rounds=1", share, f"initial_model={earlier / 'last.pt'}"])
    with pytest.raises(ConfigError, match=r"weight', or another frozen tensor, differs .*model.share"):
        if runs == "virtual":
            run_virtual(config, CLUSTER, tmp_path / "a")
        else:
            FedSync(config, CLUSTER, out=tmp_path / "b", timing=TIMING).start(DirectGrid(2))
    built = StrategyConfig.load("bsp", ["stop.rounds=1", share])
    run_virtual(built, CLUSTER, tmp_path / "own")
    config = StrategyConfig.load("bsp", ["stop.rounds=1", share, f"initial_model={tmp_path / 'own' / 'last.pt'}"])
    assert run_virtual(config, CLUSTER, tmp_path / "again")["rounds"] == 1, "those of the task itself"


@pytest.mark.parametrize("runs", ["virtual", "flower"])
def test_a_file_that_is_no_model_of_the_task_is_refused(runs: str, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.pt"
    torch.save({"weight": torch.zeros(3)}, wrong)
    for path, told in {wrong: "weight", tmp_path / "none.pt": "there is no such file"}.items():
        config = StrategyConfig.load("bsp", ["stop.rounds=1", f"initial_model={path}"])
        with pytest.raises(ConfigError, match=told):
            if runs == "virtual":
                run_virtual(config, CLUSTER, tmp_path / "a")
            else:
                FedSync(config, CLUSTER, out=tmp_path / "b", timing=TIMING).start(DirectGrid(2))
