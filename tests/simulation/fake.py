"""Runs of the virtual driver with workers that compute nothing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedsync.config.cluster import ClusterConfig, SiloConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Action
from fedsync.core.coordinator import Coordinator
from fedsync.core.events import Event
from fedsync.core.journal import JournalEntry, read_journal
from fedsync.core.orders import Evaluation, SiloFacts, WorkOrder, WorkReport
from fedsync.model.layout import Vector
from fedsync.model.plain_aggregator import PlainAggregator
from fedsync.model.plain_replica import PlainReplica
from fedsync.model.transfer import Replica
from fedsync.observe.ledger import Ledger
from fedsync.observe.recorder import Recorder
from fedsync.silo.protocol import Completed, EvaluateModel
from fedsync.simulation.engine import VirtualDriver, Worker
from fedsync.simulation.machine import Machine

Twist = Callable[[WorkOrder, Vector, WorkReport], tuple[Vector, WorkReport]]


@dataclass
class FakeWorker:
    """Adds 1 to every value of the model, and says that half of 40 test samples are right.

    Args:
        silo: its machine, for the facts.
        examples: training samples it claims.
        twist: alters update and report of an order, or raises.
    """

    silo: SiloConfig
    examples: int = 10_000
    twist: Twist | None = None
    bases: list[Vector] = field(default_factory=list)
    replica: Replica = field(default_factory=lambda: PlainReplica(3))

    @property
    def facts(self) -> SiloFacts:
        return SiloFacts(self.examples, self.silo.memory_samples, self.silo.speed)

    def train(self, order: WorkOrder, base: Vector) -> Completed:
        self.bases.append(base)
        report = WorkReport(
            base_version=order.base_version,
            steps=order.max_steps,
            samples=order.planned_samples,
            compute_s=123.0,  # the driver puts virtual times in place of these
            loss=1.0 / (1 + order.base_version),
            overhead_s={"nonsense": 9.0},
            evaluation=self.evaluate(base, EvaluateModel(order.base_version)) if order.evaluate else None,
        )
        update = np.ones_like(base)
        if self.twist is not None:
            update, report = self.twist(order, update, report)
        return Completed(report, update)

    def evaluate(self, received: Vector, asked: EvaluateModel) -> Evaluation:
        return Evaluation(loss=40.0, correct=20.0, samples=40)


@dataclass
class Result:
    """A finished run."""

    out: Path
    entries: list[JournalEntry]
    ledger: Ledger
    model: Vector | None

    @property
    def text(self) -> str:
        return (self.out / "journal.jsonl").read_text()

    def at(self) -> list[float]:
        """When the coordinator was asked."""
        return [entry.at_s for entry in self.entries]

    def events(self, kind: type[Event]) -> list[Any]:
        return [event for entry in self.entries for event in entry.events if isinstance(event, kind)]

    def actions(self, *kinds: type[Action]) -> list[tuple[float, Any]]:
        """Actions of these kinds, and when [s]."""
        return [(entry.at_s, action) for entry in self.entries for action in entry.actions if isinstance(action, kinds)]

    def round_seconds(self) -> list[float]:
        return [row.seconds for row in self.ledger.rounds]


def strategy(**sections: Any) -> StrategyConfig:
    """LB-BSP for three rounds of 20 steps x 32 samples; sections are replaced by keyword."""
    plain: dict[str, Any] = {
        "name": "fake",
        "seed": 7,
        "stop": {"rounds": 3},
        "local": {"steps": 20, "batch_size": 32},
        "predictor": {"kind": "ema", "alpha": 0.2},
        "balancer": {"kind": "proportional"},
        "barrier": {"kind": "bsp"},
        "task": {"kind": "digits"},
    }
    return StrategyConfig.model_validate({**plain, **sections})


def machines(*silos: dict[str, Any]) -> list[SiloConfig]:
    """Silos a, b, c... of a silo file."""
    return [SiloConfig.model_validate({"name": "abcdefgh"[i], **silo}) for i, silo in enumerate(silos)]


def simulate(
    out: Path,
    silos: Sequence[SiloConfig],
    config: StrategyConfig | None = None,
    twists: dict[str, Twist] | None = None,
    workers: dict[str, Worker] | None = None,
    poll_s: float = 0.0,
    size: int = 3,
) -> Result:
    """Run to the end; errors of the driver come through after the files are closed."""
    config = config or strategy()
    if workers is None:
        workers = {silo.name: FakeWorker(silo, twist=(twists or {}).get(silo.name)) for silo in silos}
    recorder = Recorder(
        out,
        runtime="virtual",
        config=config.model_dump(mode="json"),
        silos=[silo.model_dump(mode="json") for silo in silos],
        model_bytes=4 * size,
    )
    policies = config.policies(ClusterConfig(silos=list(silos)).at_start)
    model = np.zeros(size, dtype=np.float32)
    aggregator = PlainAggregator(model, wire=config.wire.formats)
    driver = VirtualDriver(
        Coordinator(policies),
        aggregator,
        {silo.name: Machine(silo, config.seed) for silo in silos},
        workers,
        recorder,
        poll_s,
    )
    try:
        driver.run()
    finally:
        recorder.finish()
    return Result(out, list(read_journal(out / "journal.jsonl")[1]), recorder.ledger, aggregator.model)


def spoil(**changes: Any) -> Twist:
    """Alter the report of every order."""
    return lambda order, update, report: (update, replace(report, **changes))
