"""Runs of the silos a and b, of which a has something wrong with it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.simulation.run import run_virtual

SILO_APP = """\
import torch
from torch import nn
from fedsync.client import SiloApp

app = SiloApp()

@app.setup()
def setup(silo):
    wrong = silo.index == 0
    rows = torch.randn(40, 3, generator=torch.Generator().manual_seed(silo.index))
    labels = (rows[:, 0] > 0).long()
    {setup}
    return silo.use(nn.Linear(3, 2), rows, labels, wrong=wrong)

@app.train()
def fit(work, model, train, val, wrong):
    optimizer = torch.optim.SGD(model.parameters(), lr=work.learning_rate)
    for numbers in work.loader(torch.arange(40)):
        loss = nn.functional.cross_entropy(model(train[numbers]), val[numbers])
        {loss}
        optimizer.zero_grad()
        loss.backward()
        {step}
        optimizer.step()
        work.log(loss=loss)

@app.evaluate()
def test(model, train, val, wrong):
    {evaluate}
    return {{"loss": (0.5, 40), "accuracy": ((model(train).argmax(1) == val).double().mean(), 40)}}
"""

CLIENT_APP = """\
import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

def first():
    return [np.zeros(4, np.float32)]

@app.train()
def fit(msg, context):
    wrong = context.node_config["partition-id"] == 0
    arrays = [array + 0.1 for array in msg.content["arrays"].to_numpy_ndarrays()]
    metrics = {{"num-examples": 40, "train_loss": 0.5}}
    {train}
    content = RecordDict({{"arrays": ArrayRecord(arrays), "metrics": MetricRecord(metrics)}})
    return Message(content, reply_to=msg)

@app.evaluate()
def test(msg, context):
    wrong = context.node_config["partition-id"] == 0
    metrics = {{"num-examples": 40, "eval_loss": 0.5, "eval_acc": 0.25 if wrong else 0.75}}
    {evaluate}
    return Message(RecordDict({{"metrics": MetricRecord(metrics)}}), reply_to=msg)
"""

STRATEGY = """\
name: lost
stop: {{rounds: 4}}
local: {{steps: 3, batch_size: 8, learning_rate: 0.1, device: cpu, resources: false}}
balancer: {{kind: fixed}}
barrier: {{kind: bsp}}
task: {task}
"""

SILOS = ClusterConfig.model_validate({"silos": [{"name": name, "speed": 100.0} for name in ("a", "b")]})


def strategy(folder: Path, app: str, overrides: Sequence[str] = (), **wrong: str) -> StrategyConfig:
    """A strategy with this app, in which lines of code are put in the places that have names."""
    if app is SILO_APP:
        places, task = ("setup", "loss", "step", "evaluate"), "{kind: silo-app, file: app.py}"
    else:
        places, task = ("train", "evaluate"), "{kind: clientapp, app: 'app:app', model: 'app:first'}"
    (folder / "app.py").write_text(app.format(**{place: wrong.get(place, "pass") for place in places}))
    (folder / "mine.yaml").write_text(STRATEGY.format(task=task))
    return StrategyConfig.load(folder / "mine.yaml", list(overrides))


def run(folder: Path, app: str, overrides: Sequence[str] = (), **wrong: str) -> dict[str, Any]:
    """The summary of such a run in virtual time."""
    return run_virtual(strategy(folder, app, overrides, **wrong), SILOS, folder / "out")
