"""Result and log of a ServerApp: its Flower result, one line per round in Flower's log, and the best model's file.

``flwr run --stream`` shows the log.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Result

from fedsync.common import foreign
from fedsync.common.errors import FedSyncError
from fedsync.common.log_times import QuietFile
from fedsync.core.actions import KeepBest
from fedsync.flower import payloads
from fedsync.model.layout import Layout, Vector
from fedsync.model.plain_aggregator import PlainAggregator
from fedsync.observe.ledger import Ledger
from fedsync.observe.quality.kept_models import KeptModels
from fedsync.observe.recorder import ROUNDS
from fedsync.observe.rounds import Round
from fedsync.observe.run_state import RUN_LOG
from fedsync.server.driver_extension import DriverExtension

logger = foreign.logger("flwr.fedsync")
"""A child of Flower's logger, whose handler shows INFO messages only of its own tree."""


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


_LOG_BYTES = 10_000_000
_NAMED = 6
"""Maximum number of silos that a line lists by name."""


@contextmanager
def kept_log(folder: Path) -> Iterator[None]:
    """Copy this process's log, and the traceback of a failure, to `RUN_LOG` in the run's folder."""
    handler = QuietFile(folder / RUN_LOG, _LOG_BYTES, 1, level=True)
    handler.addFilter(foreign.SHOWN)
    loggers = [logging.getLogger("flwr"), logging.getLogger("fedsync")]
    levels = [each.level for each in loggers]
    for each in loggers:
        each.addHandler(handler)
    loggers[1].setLevel(logging.INFO)
    try:
        yield
    except Exception as error:
        logger.error("the run failed: %s", error, exc_info=None if isinstance(error, FedSyncError) else error)
        raise
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.removeHandler(handler)
            each.setLevel(level)
        handler.close()


class RoundLog:
    """Log of each round at its end; ``rounds`` is the number of rounds at most, None if another rule ends the run."""

    def __init__(self, rounds: int | None) -> None:
        self._rounds = rounds
        self._told: int | None = None
        self._news = 0

    def follow(self, ledger: Ledger) -> None:
        """Log all rounds since the first call; earlier rounds belong to a previous process of the run."""
        known = len(ledger.rounds) if self._told is None else self._told
        for number, row in enumerate(ledger.rounds[known:], known + 1):
            logger.info("%s", self._line(number, row, ledger))
        self._told = len(ledger.rounds)
        for news in ledger.lost.since(self._news):
            logger.warning("%s", news)
        self._news = ledger.lost.told

    def _line(self, number: int, row: Round, ledger: Ledger) -> str:
        figures = [ledger.loss_words(row), *([] if ledger.accuracy is None else [f"accuracy {ledger.accuracy:.4g}"])]
        rounds = ledger.steered.stop.get("rounds", self._rounds)
        of = "" if rounds is None else f"/{rounds}"
        return "; ".join([f"[ROUND {number}{of}] {row.seconds:.1f} s", *figures, _batches(row)])


def _batches(row: Round) -> str:
    sizes = {name: share.batch_size for name, share in row.silos.items()}
    if len(sizes) > _NAMED:
        return f"{len(sizes)} silos with batches of {min(sizes.values())} to {max(sizes.values())}"
    return "batches " + ", ".join(f"{name} {size}" for name, size in sizes.items())
