"""A run in virtual time, from configuration to files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.coordinator import Coordinator
from fedsync.core.layout import Vector
from fedsync.core.transfer import Aggregator, PlainReplica, Replica
from fedsync.observe.exporters.base import open_exporters
from fedsync.observe.recorder import Listener, Recorder
from fedsync.policies.aggregate.aggregator import PlainAggregator
from fedsync.sim.engine import VirtualDriver
from fedsync.sim.machine import Machine
from fedsync.sim.sealed import encrypted_aggregator
from fedsync.sim.workers import TrainingWorker
from fedsync.tasks.protocol import SiloSlot
from fedsync.train.loop import Trainer
from fedsync.train.weights import save_model


def run_virtual(
    config: StrategyConfig,
    cluster: ClusterConfig,
    out: Path,
    *,
    target_accuracy: float | None = None,
    listeners: Sequence[Listener] = (),
    poll_s: float = 0.0,
) -> dict[str, Any]:
    """Run a strategy on simulated machines with real training.

    Args:
        config: the strategy.
        cluster: the machines.
        out: folder for the run's files.
        target_accuracy: for ``seconds_to_target``; by default that of the stop rules.
        listeners: called after every entry of the journal.
        poll_s: see `VirtualDriver`.

    Returns:
        The summary.

    Raises:
        ConfigError: strategy and silos do not fit together.
        RunError: the run could not reach its end.
    """
    task = config.task.build()
    # Many silos in one process: their orders run one after another, so a thread each is enough.
    options = replace(config.local.build(), threads=config.local.threads or 1)
    trainers = {
        silo.name: Trainer(task, SiloSlot(silo.name, index, len(cluster.silos), config.seed), options)
        for index, silo in enumerate(cluster.silos)
    }
    trainer = next(iter(trainers.values()))
    policies, plan = config.policies(cluster.at_start), config.encryption_plan(trainer.layout, cluster.at_start)
    aggregator: Aggregator = PlainAggregator(trainer.initial_model(), keep_bases=policies.weigher.toward)
    replicas: dict[str, Replica] = {}
    if plan is not None:
        aggregator, replicas = encrypted_aggregator(plan, config, trainers)
    workers = {
        silo.name: TrainingWorker(trainers[silo.name], silo, replicas.get(silo.name, PlainReplica()))
        for silo in cluster.silos
    }
    plain = config.model_dump(mode="json")
    recorder = Recorder(
        out,
        runtime="virtual",
        config=plain,
        silos=cluster.entries(),
        model_bytes=trainer.layout.nbytes,
        target_accuracy=config.stop.target_accuracy if target_accuracy is None else target_accuracy,
        sealed_share=0.0 if plan is None else plan.share,
        listeners=listeners,
        exporters=open_exporters(config.export, out, {**plain, "runtime": "virtual"}),
    )
    driver = VirtualDriver(
        Coordinator(policies),
        aggregator,
        {silo.name: Machine(silo, config.seed) for silo in cluster.silos},
        workers,
        recorder,
        poll_s,
    )
    try:
        driver.run()
    finally:
        summary = recorder.finish()
    save_model(out / "model.pt", task, final_model(aggregator, replicas))
    return summary


def final_model(aggregator: Aggregator, replicas: Mapping[str, Replica]) -> Vector:
    """The model at the end, float32 [values]: the server's, or that of the silo with the newest."""
    if isinstance(aggregator, PlainAggregator):
        return aggregator.model
    newest = max(replicas.values(), key=lambda replica: replica.holds)
    return newest.model
