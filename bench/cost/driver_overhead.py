"""Cost of a round of the Flower driver beyond training, against flwr's own FedAvg in the same engine.

Both strategies run the same number of rounds in Flower's simulation engine. Their silos answer at once, with an
update of the model's size. Both exchange one message per silo and round, and evaluate nothing. The driver's work
remains: making messages, waiting, aggregating. A pause of FedAvg's own dominates its waiting, so the table also has
processor time. FedSync writes a checkpoint per round; the third row is a round without checkpoints.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from rich import box
from rich.console import Console
from rich.table import Table

from bench.cost import large_model
from bench.cost.large_model import Large
from fedsync.config.run_spec import RunSpec
from fedsync.config.strategy import StrategyConfig
from fedsync.core.orders import Evaluation, SiloFacts, WorkReport
from fedsync.flower import flower_messages as messages
from fedsync.flower.flower_strategy import FedSync
from fedsync.flower.process_environment import flower_in_this_process
from fedsync.model.tensor_parts import ModelForm
from fedsync.model.transfer import Payload
from fedsync.server.checkpoints import KEPT
from fedsync.silo.protocol import Hello, Reply, Train, read_request, write_reply
from fedsync.train.weights import TaskModel

SILOS, ROUNDS = 5, 12

client = ClientApp()


def _form(spec: str) -> ModelForm:
    """What a silo says of the model of a run."""
    run = RunSpec.parse(spec)
    model = TaskModel(run.task.build(), run.seed, run.model.build())
    return ModelForm.of(model.layout, model.frozen_digest.hex())


def _say(message: Message, reply: Reply, payload: Payload | None = None) -> Message:
    return messages.answer(message, write_reply(reply), payload)


@client.query()
def _query(message: Message, context: Context) -> Message:
    spec, _, _ = messages.read_request(message)
    name = f"silo-{context.node_config['partition-id']}"
    return _say(message, Hello(name, SiloFacts(examples=100), form=_form(spec)))


@client.train()
def _train(message: Message, context: Context) -> Message:
    if "fedsync" in message.content:
        _, text, payload = messages.read_request(message)
        request = read_request(text)
        if not isinstance(request, Train) or payload is None:
            raise ValueError(text)
        order = request.order
        report = WorkReport(order.base_version, order.max_steps, order.planned_samples, compute_s=0.01, loss=1.0)
        return _say(message, report, payload)
    content = {"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 100, "loss": 1.0})}
    return Message(RecordDict(content), reply_to=message)


@client.evaluate()
def _evaluate(message: Message, context: Context) -> Message:
    return _say(message, Evaluation(1.0, 1.0, 1))


@dataclass(frozen=True)
class Row:
    parameters: int
    strategy: str
    round_s: float
    cpu_s: float


@dataclass
class Clock:
    """Wall and processor time of this process at each version."""

    wall: list[float]
    cpu: list[float]

    def tick(self, *unused: Any) -> None:
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())

    def row(self, parameters: int, strategy: str) -> Row:
        # The first round starts actors.
        return Row(
            parameters,
            strategy,
            median(np.diff(self.wall)[1:]),
            float(np.mean(np.diff(self.cpu)[1:])),
        )


Start = Callable[[Grid, ArrayRecord, int, Clock], None]
"""Runs a strategy: grid, first model, its parameters, and what is told of each version."""


def measure(name: str, parameters: int, start: Start) -> Row:
    clock = Clock([], [])
    arrays = ArrayRecord(Large(parameters).model().state_dict())
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        while len(list(grid.get_node_ids())) < SILOS:
            time.sleep(0.1)
        start(grid, arrays, parameters, clock)

    run_simulation(
        app,
        client,
        num_supernodes=SILOS,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": SILOS, "logging_level": logging.ERROR},
        },
    )
    return clock.row(parameters, name)


def run_fedavg(grid: Grid, arrays: ArrayRecord, parameters: int, clock: Clock) -> None:
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=SILOS, min_available_nodes=SILOS)
    strategy.start(grid, arrays, num_rounds=ROUNDS, evaluate_fn=lambda version, arrays: clock.tick())


def run_fedsync(grid: Grid, arrays: ArrayRecord, parameters: int, clock: Clock, checkpoints: int = KEPT) -> None:
    task = f"task={{kind: custom, file: {large_model.__file__}, options: {{parameters: {parameters}}}}}"
    config = StrategyConfig.load("fedavg", [f"stop.rounds={ROUNDS}", f"min_silos={SILOS}", task])
    with tempfile.TemporaryDirectory() as folder:
        strategy = FedSync(config, out=Path(folder), checkpoints=checkpoints)
        strategy.start(grid, arrays, evaluate_fn=lambda version, arrays: clock.tick())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench/results/driver_overhead.json"))
    parser.add_argument("--parameters", type=int, nargs="+", default=[40_000, 1_000_000])
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)

    rows = []
    with tempfile.TemporaryDirectory() as folder, flower_in_this_process(Path(folder)):
        for parameters in options.parameters:
            rows.append(measure("flwr FedAvg", parameters, run_fedavg))
            rows.append(measure("FedSync", parameters, run_fedsync))
            rows.append(measure("FedSync, no checkpoints", parameters, partial(run_fedsync, checkpoints=0)))

    table = Table(
        title=f"Seconds a round beyond training: {SILOS} silos, {ROUNDS} rounds, simulation engine", box=box.SIMPLE_HEAD
    )
    for column in ("parameters", "strategy", "wall s", "ratio", "cpu s", "ratio"):
        table.add_column(column, justify="left" if column == "strategy" else "right")
    for index, row in enumerate(rows):
        base = rows[index - index % 3]
        table.add_row(
            f"{row.parameters:,}",
            row.strategy,
            f"{row.round_s:.3f}",
            f"{row.round_s / base.round_s:.3f}",
            f"{row.cpu_s:.3f}",
            f"{row.cpu_s / base.cpu_s:.3f}",
        )
    Console(width=100).print(table)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
