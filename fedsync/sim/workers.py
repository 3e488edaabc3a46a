"""Who trains in virtual time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fedsync.config.cluster import SiloConfig
from fedsync.core.orders import Evaluation, SiloFacts, WorkOrder, WorkReport
from fedsync.core.transfer import Payload, PlainReplica, Replica
from fedsync.train.loop import Trainer
from fedsync.train.sampler import Cursor


@dataclass(slots=True)
class TrainingWorker:
    """Really trains: the silo's own trainer and its place in its data.

    Args:
        trainer: of this silo.
        config: its entry in the silo file.
        port: what stands between the trainer and what travels.
    """

    trainer: Trainer
    config: SiloConfig
    replica: Replica = field(default_factory=PlainReplica)
    cursor: Cursor = field(default_factory=Cursor)

    @property
    def facts(self) -> SiloFacts:
        """What the silo says when it joins."""
        return SiloFacts(
            examples=self.trainer.examples,
            memory_samples=self.config.memory_samples,
            declared_speed=self.config.speed,
            device=self.trainer.device,
        )

    def train(self, order: WorkOrder, received: Payload) -> tuple[Payload, WorkReport]:
        """Carry out an order and keep the cursor."""
        base = self.replica.receive(received, order.base_version)
        outcome = self.trainer.run(order, base, self.cursor)
        self.cursor = outcome.cursor
        update, report = self.replica.send(outcome.update, order, outcome.report), outcome.report
        told = None if report.evaluation is None else self.replica.reported(report.evaluation)
        return update, replace(report, evaluation=told)

    def evaluate(self, received: Payload, version: int) -> Evaluation:
        """Evaluate the model ``version`` on the silo's test split."""
        return self.replica.reported(self.trainer.evaluate(self.replica.receive(received, version)))
