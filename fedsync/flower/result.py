"""Result of a run, in Flower's terms."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Result

from fedsync.flower import payloads
from fedsync.model.layout import Layout, Vector
from fedsync.observe.recorder import ROUNDS


@dataclass(repr=False)
class RunResult(Result):
    """Flower's result of a strategy, with the folder of the run's files."""

    out: Path = Path()
    summary: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FinalModel:
    """Final model of a run.

    Args:
        vector: values of the tensors that travel, float32 [layout.size].
    """

    vector: Vector
    layout: Layout
    kept: tuple[str, ...] = ()

    def arrays(self, given: ArrayRecord | None) -> ArrayRecord:
        return payloads.to_arrays(self.vector, self.layout, given, self.kept)


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
