"""flwr's own FedAvg on a large model, for `large.py`: a ServerApp and a ClientApp as in flwr's documentation.

The client adds its own number to each tensor, and needs no torch: Flower starts a process for every message, and the
imports of user code would count against it. Values are random, because Flower sends equal values once.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

TENSOR = 1_000_000
"""As `bench.cost.large_model.TENSOR`, which imports torch."""

server = ServerApp()
client = ClientApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    settings = context.run_config
    parameters, silos = int(settings["parameters"]), int(settings["silos"])
    whole, rest = divmod(parameters, TENSOR)
    tensors = [TENSOR] * whole + [rest] * (rest > 0)
    numbers = np.random.default_rng(7)
    initial = ArrayRecord(
        {f"t{index}": Array(numbers.standard_normal(size, dtype=np.float32)) for index, size in enumerate(tensors)}
    )
    rounds: list[dict[str, float]] = []
    trained: list[float] = []

    def slowest(contents: list[RecordDict], weighted_by: str) -> MetricRecord:
        trained.append(max(float(next(iter(each.metric_records.values()))["compute-s"]) for each in contents))  # type: ignore[arg-type]
        return MetricRecord({})

    def note(number: int, arrays: ArrayRecord) -> None:
        rounds.append({"at_s": time.monotonic(), "compute_s": trained[-1] if trained else 0.0})

    strategy = FedAvg(
        fraction_evaluate=0.0, min_train_nodes=silos, min_available_nodes=silos, train_metrics_aggr_fn=slowest
    )
    strategy.start(grid, initial, num_rounds=int(settings["rounds"]), evaluate_fn=note)
    Path(str(settings["times"])).write_text(json.dumps(rounds), encoding="utf-8")


@client.train()
def train(message: Message, context: Context) -> Message:
    arrays = message.content.array_records["arrays"]
    tensors = {name: array.numpy() for name, array in arrays.items()}
    began_s = time.monotonic()
    for tensor in tensors.values():
        tensor += np.float32(1e-3 * (1 + int(context.node_config["partition-id"])))
    metrics = MetricRecord({"num-examples": 24, "compute-s": time.monotonic() - began_s})
    trained = ArrayRecord({name: Array(tensor) for name, tensor in tensors.items()})
    return Message(RecordDict({"arrays": trained, "metrics": metrics}), reply_to=message)
