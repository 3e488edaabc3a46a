"""Rehearsal of a private run in virtual time: its orders are entered in ledgers in memory, and nothing is trained.

Coordinator, simulated machines and the silos' budget checks are those of the run. So a rehearsal has the balancer's
batch sizes and the evaluations by sampled silos, but no scores: stop rules based on scores do not end the rehearsal.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from fedsync.common.errors import BudgetSpent, RunError
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.coordinator import Coordinator
from fedsync.core.journal import JournalEntry
from fedsync.core.orders import Cursor, Evaluation, SiloFacts, WorkOrder, WorkReport
from fedsync.model.plain_replica import PlainReplica
from fedsync.model.transfer import NO_PAYLOAD, Payload, Replica
from fedsync.observe.recorder import Recorder
from fedsync.silo.owner.privacy_guard import PrivacyGuard
from fedsync.silo.protocol import EvaluateModel
from fedsync.simulation.engine import Untrained, VirtualDriver
from fedsync.simulation.machine import Machine
from fedsync.simulation.timing_only import MODEL_BYTES, NoAggregator
from fedsync.train.silo_trainer import Outcome


@dataclass
class RehearsedSilo:
    """Worker that spends a silo's budget without training; see `fedsync.simulation.engine.Worker`. ``rates`` are the
    sampling rates of its steps. It ``ran_out`` if its budget had no room for an order.
    """

    guard: PrivacyGuard
    facts: SiloFacts
    replica: Replica = field(default_factory=lambda: PlainReplica(0))
    rates: set[float] = field(default_factory=set)
    ran_out: bool = False

    def estimate(self, batch_size: int) -> None:
        """Spend the steps from which a silo estimates its updates before the run; raise `BudgetSpent` without room."""
        if self.guard.estimate:
            batch_size = min(batch_size, self.facts.examples)
            self.guard.estimated(WorkOrder("", 0, 1, batch_size, self.guard.estimate, 1.0, seed=0))

    def train(self, order: WorkOrder, received: Payload) -> Untrained:
        try:
            order = self.guard.allow(order)
        except BudgetSpent:
            self.ran_out = True
            raise
        report = WorkReport(order.base_version, order.max_steps, order.planned_samples, 0.0, None)
        self.guard.released(order, Outcome(np.zeros(0, np.float32), report, Cursor()))
        self.rates.add(self.guard.settings.rate(order.batch_size))
        return Untrained()

    def evaluate(self, received: Payload, asked: EvaluateModel) -> None:
        self.guard.judged(lambda _: Evaluation(None, None, self.facts.examples), "evaluation")


class _NoFiles:
    """Recorder of nothing."""

    def record(self, entry: JournalEntry) -> None: ...

    def keep(self, name: str, value: object) -> None: ...


def rehearse(config: StrategyConfig, cluster: ClusterConfig, silos: Mapping[str, RehearsedSilo]) -> None:
    """Let ``silos`` spend what the run costs them, to its end or until too few of them are left. A silo with a
    validation split also spends a score of the best version, which a rehearsal does not know.
    """
    machines = {silo.name: Machine(silo, config.seed) for silo in cluster.silos}
    coordinator = Coordinator(config.policies(cluster.at_start))
    recorder = cast(Recorder, _NoFiles())
    with suppress(RunError):
        VirtualDriver(coordinator, NoAggregator(MODEL_BYTES), machines, silos, recorder).run()
    for silo in silos.values():
        if silo.facts.validates and config.fraction_evaluate and not silo.ran_out:
            with suppress(BudgetSpent):
                silo.evaluate(NO_PAYLOAD, EvaluateModel(0))
