"""Flower ClientApps for tests, and what hosts them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedsync.client import Silo, steps
from fedsync.model.tensor_parts import UNSAID, PartPatterns
from fedsync.train.guests.guest_clientapp import ClientAppTrainer, FirstModel
from fedsync.train.options import LocalOptions

SITE = Silo(1, "silo-1", 7, "cpu", train_config={"warm": True}, evaluate_config={"top": 3})
SAMPLES = 40

Loop = Callable[[Message, Context, nn.Module], dict[str, float]]


class Tied(nn.Module):
    """Two layers with one weight, and a counter of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(3, 3, bias=False)
        self.norm = nn.BatchNorm1d(3)
        self.decode = nn.Linear(3, 3, bias=False)
        self.decode.weight = self.encode.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.norm(self.encode(x)))


def loader(batch_size: int) -> DataLoader[Any]:
    inputs = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(inputs), batch_size=batch_size, shuffle=True)


def app_of(loop: Loop) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        model = Tied()
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        metrics = {"num-examples": SAMPLES, **loop(msg, context, model)}
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)})
        return Message(content=content, reply_to=msg)

    return app


def hosted(
    app: Any, folder: Path = Path("/nowhere"), site: Silo = SITE, run: PartPatterns = UNSAID, **first: Any
) -> ClientAppTrainer:
    made = FirstModel(**(first or {"make": Tied}))
    return ClientAppTrainer(app, made, site, 3, LocalOptions(device="cpu"), folder, run)


def stepwise(msg: Message, context: Context, model: nn.Module) -> dict[str, float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=msg.content["config"]["lr"]), []
    batches = steps(msg, loader(msg.content["config"]["batch-size"]))
    for (inputs,) in batches:
        loss = (model(inputs) - inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert len(batches) == len(losses)
    return {"train_loss": sum(losses) / len(losses)}


def opaque(msg: Message, context: Context, model: nn.Module) -> dict[str, float]:
    with torch.no_grad():
        model.encode.weight += msg.content["config"]["batch-size"] * msg.content["config"]["max-steps"]
    return {"train_loss": 0.5, "F1-score": 0.25, "lost": float("nan")}


def remembering(msg: Message, context: Context, model: nn.Module) -> dict[str, float]:
    """Keeps counters and a layer in ``context.state``; fails where the weight says so."""
    state = context.state
    count = state["counts"]["orders"] if "counts" in state else 0
    state["counts"] = MetricRecord({"orders": count + 1, "losses": [0.5, 0.25]})
    state["about"] = ConfigRecord({"key": b"\x00\xff", "words": ["a", "b"], "on": True})
    state["head"] = ArrayRecord({"weight": array(np.full((2, 2), count, np.float64))})
    if msg.content["config"]["learning-rate"] > 1:
        raise OSError("the disk is gone")
    return {"orders": float(count)}


def array(values: Any) -> Any:
    return ArrayRecord([values])["0"]
