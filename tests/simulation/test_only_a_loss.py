"""An app that tells a loss and no score: no accuracy is shown anywhere, and the loss decides."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.simulation.run import run_virtual

APP = """\
import torch
from torch import nn
from fedsync.client import SiloApp

app = SiloApp()

@app.setup()
def setup(silo):
    draw = torch.Generator().manual_seed(silo.index)
    return silo.use(nn.Linear(3, 3), torch.randn(40, 3, generator=draw))

@app.train()
def fit(work, model, train):
    optimizer = torch.optim.SGD(model.parameters(), lr=work.learning_rate)
    for rows in work.loader(train):
        optimizer.zero_grad()
        (model(rows) - rows).square().mean().backward()
        optimizer.step()

@app.evaluate()
def test(model, train):
    return {"loss": ((model(train) - train).square().mean(), len(train))}
"""
STRATEGY = """\
name: autoencoder
stop: {rounds: 12, patience: 3}
local: {steps: 3, batch_size: 8, learning_rate: 0.1, device: cpu, resources: false}
balancer: {kind: fixed}
barrier: {kind: bsp}
task: {kind: silo-app, file: app.py}
"""


def run(folder: Path, *more: str, app: str = APP) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    (folder / "app.py").write_text(app)
    (folder / "mine.yaml").write_text(STRATEGY)
    silos = ClusterConfig.model_validate({"silos": [{"name": name, "speed": 100.0} for name in ("a", "b")]})
    summary = run_virtual(StrategyConfig.load(folder / "mine.yaml", list(more)), silos, folder / "out")
    return summary, [json.loads(line) for line in (folder / "out" / "rounds.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("cipher", ["{kind: plain}", "{kind: pad}", "{kind: pad, examples: 40}"])
def test_neither_an_accuracy_nor_a_training_loss_is_shown(cipher: str, tmp_path: Path) -> None:
    summary, rows = run(tmp_path, "stop={rounds: 3}", f"cipher={cipher}")
    assert summary["accuracy"] is None
    assert {row["accuracy"] for row in rows} == {None} == {row["loss"] for row in rows}
    losses = [row["test_loss"] for row in rows if row["test_loss"] is not None]
    assert len(losses) >= 2 and losses == sorted(losses, reverse=True) and losses[-1] > 0


@pytest.mark.parametrize("cipher", ["{kind: plain}", "{kind: pad}"])
def test_patience_goes_by_the_loss(cipher: str, tmp_path: Path) -> None:
    assert run(tmp_path, f"cipher={cipher}")[0]["rounds"] == 12, "it gets better all the time"
    (tmp_path / "diverging").mkdir()
    diverging = run(tmp_path / "diverging", "local.learning_rate=3.5", f"cipher={cipher}")[0]
    assert diverging["rounds"] < 12 and "no better accuracy in 3 evaluated versions" in diverging["stopped_by"]


def test_silos_of_one_process_have_workers_that_send_batches_of_a_class_of_the_file(tmp_path: Path) -> None:
    """The file runs once for each silo, so the class is another one at each."""
    workers = "num_workers=1, timeout=5, collate_fn=Rows"
    app = APP.replace("app = SiloApp()", "app = SiloApp()\n\nclass Rows(list):\n    pass")
    app = app.replace("work.loader(train)", f"work.loader(train, {workers})").replace("for rows", "for (*rows,)")
    app = app.replace("    optimizer.zero", "    rows = torch.stack(rows)\n        optimizer.zero")
    summary, _ = run(tmp_path, "stop={rounds: 2}", "min_silos=2", app=app)
    assert summary["rounds"] == 2 and not summary["notes"]
