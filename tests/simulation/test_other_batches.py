"""What the result of a run says of training code that does not do what is balanced, or has more digits than travel."""

from pathlib import Path
from typing import Any

import pytest

from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.extras.report.data import read_run
from fedsync.simulation.run import run_virtual
from fedsync.train.weights import say_rounded

APP = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from fedsync.client import SiloApp

app = SiloApp()

@app.setup()
def setup(silo):
    rows = torch.randn(50, 3, generator=torch.Generator().manual_seed(silo.index))
    return silo.use(nn.Linear(3, 3).double(), rows.double(), odd=silo.name == "odd")

@app.train()
def fit(work, model, train, odd):
    optimizer = torch.optim.SGD(model.parameters(), lr=work.learning_rate)
    own = DataLoader(TensorDataset(train), batch_size=8 if odd else work.batch_size)
    for (rows,) in work.batches(batch for _ in range(9) for batch in own):
        optimizer.zero_grad()
        (model(rows) - rows).square().mean().backward()
        optimizer.step()
"""
STRATEGY = """\
name: batches
stop: {rounds: 4}
local: {steps: 5, batch_size: 8, learning_rate: 0.1, device: cpu, resources: false}
predictor: {kind: ema}
barrier: {kind: bsp}
task: {kind: silo-app, file: app.py}
"""


def run(folder: Path, balancer: str, app: str = APP) -> dict[str, Any]:
    (folder / "app.py").write_text(app)
    (folder / "mine.yaml").write_text(STRATEGY)
    speeds = {"even": 100.0, "odd": 300.0}
    silos = ClusterConfig.model_validate({"silos": [{"name": name, "speed": speed} for name, speed in speeds.items()]})
    strategy = StrategyConfig.load(folder / "mine.yaml", [f"balancer.kind={balancer}"])
    return run_virtual(strategy, silos, folder / "out")


def test_a_silo_with_batches_of_its_own_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first order has 8 samples a step, as its batches do; from then on it is given 12."""
    say_rounded.cache_clear()
    summary = run(tmp_path, "proportional")
    assert [silo["batch_size"] for silo in summary["silos"]] == [4, 12]
    (note,) = summary["notes"]
    assert note.startswith("batches do not have the ordered size") and "odd (15 of 20 steps)" in note
    assert "even" not in note
    assert read_run(tmp_path / "out").summary["notes"][0] == note
    told = [each.getMessage() for each in caplog.records]
    assert len(told) == 2 and "float64" in told[0] and "weight" in told[0] and "odd" in told[1]


def test_a_silo_whose_loop_changes_nothing_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An order with fewer batches than gradients are accumulated over ends before the optimizer's first step."""
    forgetful = APP.replace("        optimizer.step()", "        not odd and optimizer.step()")
    assert run(tmp_path, "fixed", forgetful)["notes"] == [
        "training changed nothing in the model: odd (20 of 20 steps); the silo's log says why"
    ]
    assert caplog.text.count("silo odd: an order's steps changed nothing in the model; call optimizer.step()") == 1


def test_nothing_is_said_where_nothing_is_balanced(tmp_path: Path) -> None:
    assert run(tmp_path, "fixed")["notes"] == []
