"""Flower result of a run, and the extensions of the server's main loop that fill it and save the best model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Result

from fedsync.core.actions import KeepBest
from fedsync.flower import payloads
from fedsync.model.layout import Layout, Vector
from fedsync.model.plain_aggregator import PlainAggregator
from fedsync.observe.quality.kept_models import KeptModels
from fedsync.observe.recorder import ROUNDS
from fedsync.server.driver_extension import DriverExtension


@dataclass(repr=False)
class RunResult(Result):
    """Flower's result of a strategy, with the folder of the run's files."""

    out: Path = Path()
    summary: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FinalModel:
    """Final model of a run; ``vector`` has the tensors that travel, float32 [layout.size]."""

    vector: Vector
    layout: Layout
    kept: tuple[str, ...] = ()
    ties: Mapping[str, str] = field(default_factory=dict)

    def arrays(self, given: ArrayRecord | None) -> ArrayRecord:
        return payloads.to_arrays(self.vector, self.layout, given, self.kept, self.ties)


EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


class ServerEvaluation(DriverExtension):
    """Evaluation of every version at the server, from version 0 on, by the user's function; ``result`` gets the
    metrics. A resumed run begins with the first version after its checkpoint, and lacks metrics of earlier ones.
    """

    def __init__(
        self, evaluate: EvaluateFn, model: Callable[[], FinalModel], given: ArrayRecord | None, result: Result
    ) -> None:
        self._evaluate, self._model, self._given, self._result = evaluate, model, given, result

    def on_version(self, version: int) -> None:
        metrics = self._evaluate(version, self._model().arrays(self._given))
        if metrics is not None:
            self._result.evaluate_metrics_serverapp[version] = metrics


class BestModel(DriverExtension):
    """Writer of the best version's files in an unencrypted run, while the main loop is idle."""

    def __init__(self, models: KeptModels, aggregator: PlainAggregator) -> None:
        self._models, self._aggregator = models, aggregator

    def on_best(self, best: KeepBest) -> None:
        self._models.keep(best, self._aggregator.best)

    def on_idle(self) -> None:
        self._models.write_if_due()


def fill_metrics(result: Result, out: Path) -> None:
    """Copy the metrics of all rounds from the run's files into Flower's result; the ledger has only the newest."""
    with (out / ROUNDS).open(encoding="utf-8") as file:
        for row in map(json.loads, file):
            loss = {} if row["loss"] is None else {"train_loss": row["loss"]}
            result.train_metrics_clientapp[row["round"]] = MetricRecord(
                {**row["metrics"], **loss, "seconds": row["seconds"], "silos": len(row["silos"])}
            )
            told = {"accuracy": row["accuracy"], "loss": row["test_loss"]}
            if any(value is not None for value in told.values()):
                tested = MetricRecord({name: value for name, value in told.items() if value is not None})
                result.evaluate_metrics_clientapp[row["round"]] = tested
