"""Bytes, journals and models of a run are those of its shared part, in the clear and encrypted; silos are alike."""

import json
from pathlib import Path

import pytest
import torch

from fedsync.common.errors import ConfigError
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.simulation.run import run_virtual

SILOS = ClusterConfig.model_validate(
    {"silos": [{"name": name, "speed": 1000 + 500 * n} for n, name in enumerate("abc")]}
)

TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedsync import PartPatterns, SiloData, Task


class Bodied(Task):
    '''30 values that travel; beside them, if wanted, 90,000 that are frozen, and 3,000 that are private.'''

    def __init__(self, body):
        self.body = body

    def model(self):
        modules = {"net": nn.Linear(5, 5)}
        if self.body:
            modules["body"] = nn.Linear(299, 300).requires_grad_(False)
            modules["own"] = nn.Linear(99, 30)
        return nn.ModuleDict(modules)

    def parts(self):
        return PartPatterns(private=["own.*"] if self.body else [])

    def data(self, slot):
        inputs = torch.randn(60, 5, generator=torch.Generator().manual_seed(slot.index))
        samples = TensorDataset(inputs, inputs.argmax(dim=1))
        return SiloData(samples, samples)

    def loss(self, model, batch):
        still = sum(own.sum() for own in model["own"].parameters()) if self.body else None
        return super().loss(model["net"], batch) + (still - still.detach() if self.body else 0.0)

    def score(self, model, batch):
        return super().score(model["net"], batch)
"""


Found = tuple[dict[str, int], str, dict[str, torch.Tensor]]
"""Bytes, rounds and model of a run."""


def run(folder: Path, strategy: str, body: bool, *overrides: str) -> Found:
    folder.mkdir(parents=True)
    (folder / "bodied.py").write_text(TASK)
    task = {"kind": "custom", "file": str(folder / "bodied.py"), "options": {"body": body}}
    quick = ["stop={rounds: 3}", "local={steps: 3, batch_size: 8}", f"task={json.dumps(task)}"]
    out = folder / "run"
    summary = run_virtual(StrategyConfig.load(strategy, [*quick, *overrides]), SILOS, out)
    model = torch.load(out / "model.pt", weights_only=True)
    return {key: summary[key] for key in ("bytes_up", "bytes_down")}, (out / "rounds.jsonl").read_text(), model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "cipher"),
    [
        ("fedavg", "plain"),
        ("fedavg", "bfv"),
        ("lb-bsp", "masked"),
        ("ssp", "pad"),
        ("elastic", "plain"),
        ("pssp", "plain"),
    ],
)
def test_a_run_is_that_of_its_shared_part(strategy: str, cipher: str, tmp_path: Path) -> None:
    with_body, without = (
        run(tmp_path / str(body), strategy, body, f"cipher={{kind: {cipher}}}") for body in (True, False)
    )
    assert with_body[:2] == without[:2]
    for name in ("net.weight", "net.bias"):
        assert torch.equal(with_body[2][name], without[2][name])
    assert with_body[2].keys() - without[2].keys() == {"body.weight", "body.bias", "own.weight", "own.bias"}
    if cipher == "plain":
        orders = with_body[0]["bytes_up"] / (4 * 30)
        assert orders == int(orders) >= 3


APP = """
import torch
from torch import nn

from fedsync.client import SiloApp

app = SiloApp()


@app.setup()
def setup(silo):
    torch.manual_seed(1)
    net = nn.ModuleDict({"body": nn.Linear(3, 3).requires_grad_(False), "net": nn.Linear(2, 1)})
    if silo.name == silo.options.get("odd"):
        with torch.no_grad():
            net["body"].bias[0] += 1e-6
    if silo.name == silo.options.get("wide"):
        net["net"] = nn.Linear(1, 2)
    return silo.use(net, range(20))


@app.train()
def fit(work, model):
    for _ in work.batches([None] * work.max_steps):
        with torch.no_grad():
            model["net"].bias += 0.1
"""


@pytest.mark.parametrize("cipher", ["plain", "pad"])
@pytest.mark.parametrize(
    ("silo", "problem"),
    [("odd", "'b' .*frozen tensors .*same file of weights"), ("wide", "'b' .*other names or shapes")],
)
def test_a_silo_not_alike_is_refused_before_training(silo: str, problem: str, cipher: str, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    task = {"kind": "silo-app", "file": str(tmp_path / "app.py"), "options": {silo: "b"}}
    config = StrategyConfig.load("fedavg", [f"task={json.dumps(task)}", f"cipher={{kind: {cipher}}}"])
    with pytest.raises(ConfigError, match=problem):
        run_virtual(config, SILOS, tmp_path / "run")


@pytest.mark.parametrize(
    "model", ['{private: ["nets.*"]}', '{share: ["net.*"], private: ["*bias"]}', '{private: ["*"]}']
)
def test_patterns_that_cannot_be_end_a_run_before_training(model: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"net\.|private"):
        run(tmp_path / "a", "fedavg", False, f"model={model}")
