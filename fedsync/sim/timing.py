"""Timing only: the clock, the silos and all that decides, but no model, no data and no training.

For studies of progress with up to 100,000 silos. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedsync.config.cluster import ClusterConfig, SiloConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Commit
from fedsync.core.coordinator import Coordinator
from fedsync.core.layout import Vector
from fedsync.core.orders import SiloFacts, WorkOrder, WorkReport
from fedsync.observe.recorder import Listener, Recorder
from fedsync.sim.engine import VirtualDriver
from fedsync.sim.machine import Machine

MODEL_BYTES = 1_000_000
"""Bytes of the model and of each update, unless told otherwise: 250,000 values."""


@dataclass(frozen=True, slots=True)
class TimingWorker:
    """Says that every order was carried out in full, and knows nothing of accuracy.

    Args:
        facts: what the silo says when it joins.
    """

    facts: SiloFacts

    @classmethod
    def of(cls, silo: SiloConfig) -> TimingWorker:
        """Worker of a silo in the silo file."""
        return cls(SiloFacts(silo.examples, silo.memory_samples, silo.speed))

    def train(self, order: WorkOrder, base: Vector) -> tuple[Vector, WorkReport]:
        """Nothing is done: the update is the model's stand-in, and the driver knows the times."""
        return base, WorkReport(order.base_version, order.max_steps, order.planned_samples, compute_s=1.0, loss=0.0)

    def evaluate(self, model: Vector) -> None:
        """Nothing is known."""


class NoStore:
    """Stands in for a model: has its size, and nothing to add.

    Args:
        nbytes: of the model; rounded down to whole float32 values.
    """

    def __init__(self, nbytes: int) -> None:
        # One zero, seen from many places.
        self.model: Vector = np.broadcast_to(np.float32(0), (nbytes // 4,))

    def begin(self, update_id: str) -> None:
        """Nothing to keep."""

    def put(self, silo: str, update_id: str, update: Vector) -> None:
        """Nothing to keep."""

    def commit(self, commit: Commit) -> None:
        """Nothing to add."""

    def remember(self) -> None:
        """Nothing to remember."""

    def rollback(self) -> None:
        """Nothing to go back to."""

    def discard(self, update_id: str) -> None:
        """Nothing to forget."""


def run_timing(
    config: StrategyConfig,
    cluster: ClusterConfig,
    out: Path,
    *,
    target_accuracy: float | None = None,
    listeners: Sequence[Listener] = (),
    poll_s: float = 0.0,
    model_bytes: int = MODEL_BYTES,
    journal: bool = True,
) -> dict[str, Any]:
    """Run a strategy on simulated machines without training.

    Args:
        config: the strategy; its task is not looked at.
        cluster: the machines.
        out: folder for the run's files.
        target_accuracy: not used: there is no accuracy.
        listeners: called after every entry of the journal.
        poll_s: see `VirtualDriver`.
        model_bytes: size of the model and of an update, for machines with a bandwidth.
        journal: see `Recorder`; without it a run is several times as fast and fits memory and disk.

    Returns:
        The summary; accuracy and loss are None.

    Raises:
        ConfigError: strategy and silos do not fit together.
        RunError: the run could not reach its end.
    """
    recorder = Recorder(
        out,
        runtime="virtual",
        config=config.model_dump(mode="json"),
        silos=cluster.entries(),
        model_bytes=model_bytes,
        listeners=listeners,
        journal=journal,
    )
    driver = VirtualDriver(
        Coordinator(config.policies(cluster.at_start)),
        NoStore(model_bytes),
        {silo.name: Machine(silo, config.seed) for silo in cluster.silos},
        {silo.name: TimingWorker.of(silo) for silo in cluster.silos},
        recorder,
        poll_s,
        windows=False,
    )
    try:
        driver.run()
    finally:
        summary = recorder.finish()
    return summary
