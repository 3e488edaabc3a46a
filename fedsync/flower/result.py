"""What a run comes to, in Flower's terms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Result

from fedsync.core.layout import Layout, Vector
from fedsync.flower import payloads
from fedsync.observe.ledger import Ledger


@dataclass(repr=False)
class RunResult(Result):
    """Flower's result of a strategy, and where the run's files are.

    Args:
        out: folder of the run's files.
        summary: what ``summary.json`` there says.
    """

    out: Path = Path()
    summary: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FinalModel:
    """What a run came to.

    Args:
        vector: float32 [layout.size].
        layout: of the model.
        kept: names of tensors that do not travel.
    """

    vector: Vector
    layout: Layout
    kept: tuple[str, ...] = ()

    def arrays(self, given: ArrayRecord | None) -> ArrayRecord:
        """The model in the form of the one that the run was given, if it was."""
        return payloads.to_arrays(self.vector, self.layout, given, self.kept)


def fill_metrics(result: Result, ledger: Ledger) -> None:
    """Put what a run's books say into Flower's result of it."""
    for row in ledger.rounds:
        loss = {} if row.loss is None else {"train_loss": row.loss}
        result.train_metrics_clientapp[row.round] = MetricRecord(
            {**row.metrics, **loss, "seconds": row.seconds, "silos": len(row.silos)}
        )
        told = {"accuracy": row.accuracy, "loss": row.test_loss}
        if any(value is not None for value in told.values()):
            tested = MetricRecord({name: value for name, value in told.items() if value is not None})
            result.evaluate_metrics_clientapp[row.round] = tested
