"""Simulation of timing only, up to 100,000 silos: clock, silos and all decisions, but no model, data or torch."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from fedsync.common.run_claim import Claim, claimed
from fedsync.config.cipher import PlainConfig
from fedsync.config.cluster import ClusterConfig, SiloConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Commit
from fedsync.core.coordinator import Coordinator
from fedsync.core.orders import SiloFacts, Subject, WorkOrder
from fedsync.model.broadcast_compression import download_bytes
from fedsync.model.plain_replica import RECEIVED, PlainReplica
from fedsync.model.plain_wire import FP32, Wire
from fedsync.model.transfer import NO_PAYLOAD, InTheClear, Payload, Replica
from fedsync.observe.recorder import Listener
from fedsync.observe.run_builder import RunBuilder
from fedsync.silo.protocol import EvaluateModel
from fedsync.simulation.engine import Stuck, Untrained, VirtualDriver
from fedsync.simulation.machine import Machine

MODEL_BYTES = 1_000_000
"""Default size of the model and of each update [bytes]: 250,000 values."""

_IN_THE_CLEAR, _NOTHING = PlainReplica(0), Untrained()


@dataclass(frozen=True, slots=True)
class TimingWorker:
    """Worker that trains nothing: every order counts as complete, and accuracy is unknown. With ``tells`` it reports
    the received bytes, like a silo that receives only the changes of the model.
    """

    facts: SiloFacts
    tells: bool = False
    replica: Replica = _IN_THE_CLEAR

    @classmethod
    def of(cls, silo: SiloConfig, wire: Wire | None = None) -> TimingWorker:
        tells = wire is not None and wire.down is not FP32
        return cls(SiloFacts(silo.examples, silo.memory_samples, silo.speed), tells)

    def train(self, order: WorkOrder, received: Payload) -> Untrained:
        return Untrained({RECEIVED: float(received.nbytes)}) if self.tells else _NOTHING

    def evaluate(self, received: Payload, asked: EvaluateModel) -> None: ...


class NoAggregator(InTheClear):
    """Aggregator substitute with a model's size, but no values; with ``controls``, downloads add as many bytes."""

    def __init__(self, nbytes: int, wire: Wire | None = None, *, controls: bool = False) -> None:
        wire = wire or Wire()
        self._values = nbytes // 4
        self._down = wire.down
        self._beside = nbytes if controls else 0
        self.upload_bytes = wire.up.payload_bytes(self._values)
        self._version = 0
        self._held: dict[str, int] = {}

    def holds(self, silo: str, version: int) -> None:
        self._held[silo] = version

    def outgoing(self, silo: str, subject: Subject = Subject.LAST) -> Payload:
        held = self._held.get(silo)
        behind = None if held is None else self._version - held
        return _zeros(self._beside + download_bytes(self._values, self._down, behind))

    def apart(self, order: WorkOrder) -> Payload:
        return self.outgoing("") if order.after == 0 else NO_PAYLOAD

    def put_own(self, silo: str, model: Payload) -> None: ...

    def own(self, silo: str) -> Payload:
        return NO_PAYLOAD

    def begin(self, update_id: str) -> None: ...

    def put(self, silo: str, update_id: str, update: Payload) -> None: ...

    def commit(self, commit: Commit) -> None:
        self._version = commit.version

    def savepoint(self) -> None: ...

    def rollback(self) -> None:
        self._version += 1
        self._held.clear()

    def keep_best(self, version: int) -> None: ...

    def discard(self, update_id: str) -> None: ...


@lru_cache
def _zeros(nbytes: int) -> Payload:
    return np.broadcast_to(np.uint8(0), (nbytes,))


def run_timing(
    config: StrategyConfig,
    cluster: ClusterConfig,
    out: Path | Claim,
    *,
    target_accuracy: float | None = None,
    listeners: Sequence[Listener] = (),
    poll_s: float = 0.0,
    model_bytes: int = MODEL_BYTES,
    journal: bool = True,
) -> dict[str, Any]:
    """Run a strategy on simulated machines without training; return the summary, with accuracy and loss None.

    ``target_accuracy`` and the strategy's task are ignored. ``model_bytes`` is the size of the model and of an update.
    Without ``journal``, a run is several times faster and needs little memory and disk; see `Recorder`.

    Raises:
        ConfigError: strategy and silos do not fit together.
        RunError: the run could not reach its end.
    """
    with claimed(out) as folder:
        builder = RunBuilder(config, cluster, folder, "virtual", None, listeners, trains=False)
        recorder, wire = builder.recorder(model_bytes, journal=journal), config.wire.formats
        driver = VirtualDriver(
            Coordinator(builder.policies()),
            NoAggregator(model_bytes, wire, controls=config.controlled and isinstance(config.cipher, PlainConfig)),
            {silo.name: Machine(silo, config.seed) for silo in cluster.silos},
            {silo.name: TimingWorker.of(silo, wire) for silo in cluster.silos},
            recorder,
            poll_s,
        )
        try:
            with _no_garbage():
                driver.run()
        except Stuck as error:
            raise error.naming(recorder.ledger.missing()) from error
        finally:
            summary = recorder.finish()
        recorder.check_silos()
        return summary


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Disable garbage collection: a run makes no reference cycles, and at 20,000 silos the search costs a fifth."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
