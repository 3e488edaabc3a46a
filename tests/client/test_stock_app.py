"""A published Flower app, three lines changed: without FedSync's doing plain FedAvg, and where it may come from.

Balanced and sealed it is in `tests.client.test_your_loop_doc`.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord

from fedsync.common.errors import ConfigError, OwnerRefusal, ProtocolError
from fedsync.common.sandbox.path_sandbox import ALLOWED
from fedsync.config.cluster import ClusterConfig
from fedsync.config.run_spec import RunSpec
from fedsync.config.strategy import StrategyConfig
from fedsync.flower.flower_strategy import FedSync
from fedsync.server.timeouts import Timeouts
from fedsync.silo.owner.owner_policy import OwnerPolicy
from fedsync.simulation.run import run_virtual
from tests.client.stock_app import CHANGES, stock_app
from tests.flower.grid import DirectGrid, silos_in_this_process

STRATEGY = """
name: stock
stop: {rounds: 5}
min_silos: 3
local: {steps: 6, batch_size: 32, learning_rate: 0.05}
predictor: {kind: ema}
balancer: {kind: proportional}
barrier: {kind: bsp}
task: {kind: clientapp, app: "digitsapp.client_app:app", model: "digitsapp.task:Net"}
"""
SPEEDS = {"fast": 300.0, "middle": 200.0, "slow": 100.0}
FIXED = ["predictor={kind: ema}", "balancer={kind: fixed}"]


def strategy_of(folder: Path, *overrides: str) -> StrategyConfig:
    file = folder / "strategy.yaml"
    file.write_text(STRATEGY, encoding="utf-8")
    return StrategyConfig.load(file, overrides)


def cluster(**speeds: float) -> ClusterConfig:
    silos = [{"name": name, "speed": speed} for name, speed in (speeds or SPEEDS).items()]
    return ClusterConfig.model_validate({"silos": silos})


AT_ONCE = cluster(a=1e6, b=1e6, c=1e6)


def test_with_equal_batches_it_is_fedavg_by_hand(tmp_path: Path) -> None:
    """Three rounds of the app's own functions, averaged by num-examples in float64."""
    folder = stock_app(tmp_path, CHANGES)
    task = folder / "digitsapp" / "task.py"
    task.write_text(task.read_text().replace("shuffle=True", "shuffle=False"))
    rounds, steps, batch, rate = 3, 6, 32, 0.05
    config = strategy_of(folder, *FIXED, f"stop.rounds={rounds}", "seed=3")
    models: list[dict[str, np.ndarray[Any, Any]]] = []
    with silos_in_this_process():
        FedSync(config, AT_ONCE, out=tmp_path / "out", timing=Timeouts(poll_s=0.001)).start(
            DirectGrid(3),
            evaluate_fn=lambda version, arrays: models.append({name: each.numpy() for name, each in arrays.items()}),
        )
    assert len(models) == rounds + 1
    own = importlib.import_module("digitsapp.task")
    by_hand = models[0]
    for version in range(1, rounds + 1):
        states, examples = [], []
        for partition in range(3):
            net = own.Net()
            net.load_state_dict({name: torch.from_numpy(np.asarray(array)) for name, array in by_hand.items()})
            loader, _ = own.load_data(partition, 3, batch)
            own.train(net, list(loader)[:steps], 1, rate, torch.device("cpu"))
            states.append({name: tensor.numpy().astype(np.float64) for name, tensor in net.state_dict().items()})
            examples.append(len(loader.dataset))
        shares = np.array(examples) / sum(examples)
        by_hand = {
            name: sum(share * state[name] for share, state in zip(shares, states, strict=True)).astype(np.float32)
            for name in by_hand
        }
        for name, expected in by_hand.items():
            scale = np.abs(expected).max()
            assert np.abs(models[version][name] - expected).max() <= 1e-6 * scale, name


def test_a_serverapps_first_model_needs_no_model_at_silos(tmp_path: Path) -> None:
    folder = stock_app(tmp_path, CHANGES)
    config = strategy_of(folder, "task={kind: clientapp, app: 'digitsapp.client_app:app'}", "stop.rounds=1")
    config = config.model_copy(update={"task": config.task.relocated(lambda path: str((folder / path).resolve()))})
    state = {"conv.weight": (8, 1, 3, 3), "conv.bias": (8,), "norm.weight": (8,), "norm.bias": (8,)}
    state |= {"norm.running_mean": (8,), "norm.running_var": (8,), "norm.num_batches_tracked": ()}
    state |= {"fc.weight": (10, 128), "fc.bias": (10,)}
    draw = np.random.default_rng(5)
    first = {name: torch.tensor(np.abs(draw.normal(size=shape)) * 0.1) for name, shape in state.items()}
    given = ArrayRecord({name: tensor.float() for name, tensor in first.items() if "tracked" not in name})
    given["norm.num_batches_tracked"] = ArrayRecord([np.zeros((), np.int64)])["0"]
    with silos_in_this_process():
        result = FedSync(config, AT_ONCE, out=tmp_path / "out", timing=Timeouts(poll_s=0.001)).start(
            DirectGrid(3), given
        )
    moved = result.arrays["fc.weight"].numpy() - given["fc.weight"].numpy()
    assert np.abs(moved).max() > 0


@pytest.mark.parametrize(
    ("task", "problem"),
    [
        ("{kind: clientapp, app: 'digitsapp.nothing:app'}", "there is no such file"),
        ("{kind: clientapp, app: 'digitsapp.client_app:other'}", "there is no other in it"),
        ("{kind: clientapp, app: 'digitsapp.client_app:app', model: 'digitsapp.task:Nett'}", "no Nett in it"),
        ("{kind: clientapp, app: 'digitsapp/client_app.py:app', model: 'digitsapp.task:Net'}", "modules in both"),
    ],
)
def test_an_app_that_is_not_there_is_said_so(task: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=problem):
        run_virtual(strategy_of(stock_app(tmp_path, CHANGES), f"task={task}"), cluster(), tmp_path / "out")


@pytest.mark.parametrize("app", ["digitsapp.client_app", "digitsapp.client_app:", "a b:app", ":app", "../x:app"])
def test_a_name_of_code_that_is_none_is_refused(app: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"[Ww]rite package\.module:name"):
        strategy_of(tmp_path, f"task={{kind: clientapp, app: '{app}'}}")


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ([("a", 2**15, 2**15), ("b", 1, 1)], "more than 1073741824"),
        ([("a", 0, 2**30), ("b", 0, 2**30)], "more than"),
        ([("a", 1, 1), ("a", 1, 1)], "a name twice"),
    ],
)
def test_a_server_cannot_describe_a_model_that_no_silo_would_take(
    tensors: list[tuple[str, int, int]], problem: str, tmp_path: Path
) -> None:
    told = [{"name": name, "dtype": "float64", "shape": list(shape)} for name, *shape in tensors]
    task = {"kind": "clientapp", "app": "digitsapp.client_app:app", "tensors": told}
    spec = {**RunSpec.of(strategy_of(tmp_path), None, 3).model_dump(mode="json"), "task": task}
    with pytest.raises(ProtocolError, match=problem):
        RunSpec.parse(json.dumps(spec))


@pytest.mark.parametrize(
    "task",
    [
        {"app": "digitsapp.client_app:app", "folder": "theirs"},
        {"app": "theirs/digitsapp/client_app.py:app"},
        {"app": "mine/digitsapp/client_app.py:app", "model": "theirs/digitsapp/task.py:Net"},
        {"app": "client_app:app", "folder": "mine/digitsapp/../.."},
    ],
)
def test_a_run_names_no_app_elsewhere(task: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOWED, OwnerPolicy(data=[str(tmp_path / "mine")]).model_dump_json())
    for place in ("mine", "theirs"):
        stock_app(tmp_path / place, CHANGES)
    base = strategy_of(tmp_path)
    names = {key: str(tmp_path / text) if "/" in text or key == "folder" else text for key, text in task.items()}
    spec = RunSpec.of(base, None, 3).model_copy(update={"task": base.task})
    lying = RunSpec.model_validate({**spec.model_dump(), "task": {"kind": "clientapp", **names}})
    with pytest.raises(OwnerRefusal, match="outside the folders that this silo's owner allows"):
        OwnerPolicy.here().checked(lying, 0)
    honest = {"kind": "clientapp", "app": "digitsapp.client_app:app", "folder": str(tmp_path / "mine")}
    checked = OwnerPolicy.here().checked(RunSpec.model_validate({**spec.model_dump(), "task": honest}), 0)
    assert checked.task.folder == str((tmp_path / "mine").resolve())  # type: ignore[union-attr]


def test_the_folder_that_an_app_imports_from_is_fenced_too(tmp_path: Path) -> None:
    folder = stock_app(tmp_path / "mine", CHANGES)
    inner = OwnerPolicy(data=[str(folder / "digitsapp")])
    task = {"kind": "clientapp", "app": "digitsapp.client_app:app", "folder": str(folder)}
    spec = RunSpec.model_validate({**RunSpec.of(strategy_of(tmp_path), None, 3).model_dump(), "task": task})
    with pytest.raises(OwnerRefusal, match="mine is outside the folders that this silo's owner allows"):
        inner.checked(spec, 0)


@pytest.mark.slow
def test_two_runs_apps_of_one_name_are_two(tmp_path: Path) -> None:
    losses = set()
    for name, rate in (("one", "0.05"), ("two", "0.01")):
        folder = stock_app(tmp_path / name, [*CHANGES, ('msg.content["config"]["lr"]', rate)])
        summary = run_virtual(strategy_of(folder, "stop.rounds=1"), cluster(), tmp_path / name / "out")
        losses.add(summary["loss"])
        assert str(tmp_path / name) in str(sys.modules["digitsapp.task"].__file__)
    assert len(losses) == 2, "the second run trained at its own rate"
