"""Shared code of the parts of `progress`: barriers, clusters, and observed runs without training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Commit, Dispatch
from fedsync.core.coordinator import Coordinator
from fedsync.core.events import UpdateArrived
from fedsync.core.journal import JournalEntry
from fedsync.observe.ledger import Ledger
from fedsync.simulation.engine import VirtualDriver
from fedsync.simulation.machine import Machine
from fedsync.simulation.timing_only import NoAggregator, TimingWorker

MODEL_BYTES = 4

BARRIERS: dict[str, dict[str, Any]] = {
    "BSP": {"kind": "bsp"},
    "ASP": {"kind": "asp"},
    "SSP(4)": {"kind": "ssp", "staleness": 4},
    "pBSP(4)": {"kind": "sampled", "sample_size": 4},
    "pBSP(4), kept": {"kind": "sampled", "sample_size": 4, "redraw": False},
    "pSSP(4, 4)": {"kind": "sampled", "sample_size": 4, "staleness": 4},
}
SIGMA, SPEED = 0.47, 17.9
"""A step of 32 samples takes 32 / 17.9 = 1.79 s in the median and 1.79 exp(0.47^2 / 2) = 2.0 s in the mean."""


class Watch:
    """Sees when each order ends and how many commits there were since it began; stands in for a recorder."""

    def __init__(self) -> None:
        self.ledger = Ledger(None, MODEL_BYTES)
        self.at_s: list[float] = []
        self.silo: list[str] = []
        self.between: list[int] = []
        self.commits: list[float] = []
        self._base: dict[str, int] = {}

    def keep(self, name: str, value: object) -> None:
        """No files."""

    def record(self, entry: JournalEntry) -> None:
        for event in entry.events:
            if isinstance(event, UpdateArrived):
                self.at_s.append(entry.at_s)
                self.silo.append(event.meta.silo)
        for action in entry.actions:
            if isinstance(action, Commit):
                self.commits.append(entry.at_s)
                for update_id in action.weights:
                    self.between.append(action.version - 1 - self._base.pop(update_id))
            elif isinstance(action, Dispatch):
                self._base[action.order.update_id] = action.order.base_version


def strategy(barrier: dict[str, Any], seed: int, **sections: Any) -> StrategyConfig:
    plain = {
        "name": "progress",
        "seed": seed,
        "local": {"steps": 1, "batch_size": 32},
        "predictor": {"kind": "memoryless"},
        "balancer": {"kind": "fixed"},
        "barrier": barrier,
        "task": {"kind": "digits", "partition": {"kind": "pathological", "classes_per_silo": 2}},
    }
    return StrategyConfig.model_validate(plain | sections)


def silos(speeds: Sequence[float], **machine: Any) -> ClusterConfig:
    entries = [{"name": f"s{i:05}", "speed": float(speed), **machine} for i, speed in enumerate(speeds)]
    return ClusterConfig.model_validate({"silos": entries})


def watch(
    barrier: dict[str, Any],
    cluster: ClusterConfig,
    seconds: float,
    seed: int,
    poll_s: float = 0.0,
) -> Watch:
    """Simulate without training."""
    config = strategy(barrier, seed, stop={"seconds": seconds})
    policies = config.policies(cluster.at_start)
    seen = Watch()
    machines = {silo.name: Machine(silo, seed) for silo in cluster.silos}
    workers = {silo.name: TimingWorker.of(silo) for silo in cluster.silos}
    VirtualDriver(Coordinator(policies), NoAggregator(MODEL_BYTES), machines, workers, seen, poll_s).run()
    return seen


def clocks(seen: Watch, cluster: ClusterConfig, instants: Sequence[float]) -> NDArray[np.int64]:
    """Orders finished, int64 [instants, silos]."""
    number = {silo.name: index for index, silo in enumerate(cluster.silos)}
    at_s, who = np.array(seen.at_s), np.array([number[name] for name in seen.silo])
    return np.stack([np.bincount(who[at_s <= instant], minlength=len(number)) for instant in instants])
