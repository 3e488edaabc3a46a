"""flwr's own FedAvg in virtual time, for `lb_bsp.py`: flwr averages, FedSync's trainers train."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import Any

from flwr.app import ArrayRecord, Message, MessageType, Metadata, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from fedsync.common.rng import Stream, derive_seed
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.orders import Cursor, WorkOrder
from fedsync.model.layout import Vector
from fedsync.simulation.machine import Machine
from fedsync.tasks.task_protocol import SiloSlot
from fedsync.train.loop import Trainer


@dataclass(slots=True)
class _Silo:
    """One silo, its place in its data, and its machine."""

    name: str
    trainer: Trainer
    machine: Machine
    cursor: Cursor = field(default_factory=Cursor)

    def train(self, config: StrategyConfig, number: int, model: Vector, now_s: float) -> tuple[Message, float]:
        """Reply of round ``number``, and when it is done; the order is the one that FedSync's FedAvg would give."""
        order = WorkOrder(
            update_id=f"{self.name}-{number}",
            base_version=number - 1,
            round=number,
            batch_size=min(config.local.batch_size, self.trainer.examples),
            max_steps=config.local.steps,
            learning_rate=config.local.learning_rate,
            seed=derive_seed(config.seed, Stream.ORDER, self.name, number),
            evaluate=False,
        )
        outcome = self.trainer.run(order, model, self.cursor)
        self.cursor = outcome.cursor
        metrics = MetricRecord({"num-examples": self.trainer.examples})
        content = RecordDict({"arrays": ArrayRecord([model + outcome.update]), "metrics": metrics})
        return _reply(self.name, number, content), self.machine.course(order, now_s).last_s


def flwr_fedavg(config: StrategyConfig, cluster: ClusterConfig) -> dict[str, Any]:
    """Rounds of flwr's `FedAvg` with its defaults: time and accuracy of each version, and how long silos wait.

    Silos, batches, seeds of the orders and machines are those of `run_virtual`, so that what differs is who averages:
    flwr the models in float32, weighted by the silos' numbers of samples. Of the strategy's file the work of a silo,
    the task, the seed and the number of rounds are read.
    """
    logging.getLogger("flwr").setLevel(logging.ERROR)
    task, names = config.task.build(), [silo.name for silo in cluster.silos]
    options = replace(config.local.build(), threads=config.local.threads or 1)
    silos = [
        _Silo(
            name, Trainer(task, SiloSlot(name, index, len(names), config.seed), options), Machine(machine, config.seed)
        )
        for index, (name, machine) in enumerate(zip(names, cluster.silos, strict=True))
    ]
    model, server = silos[0].trainer.initial_model(), FedAvg()
    now_s = computed_s = 0.0
    at_s: list[float] = []
    accuracy: list[float] = []
    for number in range(1, (config.stop.rounds or 1) + 1):
        done = [silo.train(config, number, model, now_s) for silo in silos]
        arrays, _ = server.aggregate_train(number, [reply for reply, _ in done])
        if arrays is None:
            raise RuntimeError("flwr's FedAvg averaged nothing")
        model = arrays.to_numpy_ndarrays()[0]
        computed_s += sum(end_s - now_s for _, end_s in done)
        now_s = max(end_s for _, end_s in done)
        tests = [silo.trainer.evaluate(model) for silo in silos]
        at_s.append(now_s)
        accuracy.append(sum(test.correct for test in tests) / sum(test.samples for test in tests))
    return {"at_s": at_s, "accuracy": accuracy, "wait_fraction": 1 - computed_s / (len(names) * now_s)}


def _reply(name: str, number: int, content: RecordDict) -> Message:
    """A message as flwr's server would have it of a silo; nobody sent it, so all that it says of its way is made up."""
    metadata = Metadata(
        run_id=1,
        message_id=f"{name}-{number}",
        src_node_id=2,
        dst_node_id=1,
        reply_to_message_id=f"order-{name}-{number}",
        group_id=str(number),
        created_at=0.0,
        ttl=3600.0,
        message_type=MessageType.TRAIN,
    )
    # flwr's overloads leave out how its own server makes a message of what came in.
    return Message(content=content, metadata=metadata)  # type: ignore[call-overload, no-any-return]
