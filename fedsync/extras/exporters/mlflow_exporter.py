"""MLflow exporter: one MLflow run per FedSync run, with configuration as parameters and rounds as metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fedsync.common.errors import ConfigError, not_installed
from fedsync.observe.ledger import Ledger
from fedsync.observe.recorder import RoundFeed
from fedsync.observe.rounds import figures

EXPERIMENT = "fedsync"
MOST_LETTERS = 500
"""Maximum length of a parameter's value; older MLflow servers accept no more."""
MOST_METRICS = 1000
"""MLflow's limit per request."""


class MlflowExporter:
    """Exporter to a tracking server, or to a folder or database that MLflow opens itself.

    A metric's step is the round. Its timestamp is the run's own time in milliseconds. Raises `ConfigError` if MLflow is
    not installed, or the server cannot be reached.
    """

    def __init__(self, uri: str, run: Mapping[str, Any]) -> None:
        try:
            from mlflow import MlflowClient
            from mlflow.entities import Metric, Param
        except ImportError as error:
            raise not_installed("export.mlflow", "MLflow", "mlflow") from error
        self._metric = Metric
        self._feed = RoundFeed()
        self._ended = False
        self._failed = True
        try:
            self._client = MlflowClient(tracking_uri=uri)
            known = self._client.get_experiment_by_name(EXPERIMENT)
            experiment = self._client.create_experiment(EXPERIMENT) if known is None else known.experiment_id
            self._run = self._client.create_run(experiment, run_name=str(run.get("name", ""))).info.run_id
            parameters = [Param(key, str(value)[:MOST_LETTERS]) for key, value in flat(run)]
            for first in range(0, len(parameters), 100):
                self._client.log_batch(self._run, params=parameters[first : first + 100])
        except Exception as error:
            # MLflow clients raise many kinds of errors, and only the text is informative.
            raise ConfigError("export.mlflow", f"{uri!r} does not answer: {error}", "Check the tracking URI") from error

    def follow(self, ledger: Ledger) -> None:
        metrics = [
            self._metric(f"{name}/{silo}" if silo else name, float(value), round(1000 * row.at_s), row.round)
            for row in self._feed.closed(ledger)
            for name, value, silo in figures(row)
        ]
        for first in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._run, metrics=metrics[first : first + MOST_METRICS])
        self._failed = ledger.stopped is None or ledger.stopped.failed

    def close(self) -> None:
        if not self._ended:
            self._ended = True
            self._client.set_terminated(self._run, "FAILED" if self._failed else "FINISHED")


def flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten nested mappings to pairs ``a.b, value``, without None values."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from flat(item, f"{prefix}.{key}" if prefix else str(key))
    elif value is not None:
        yield prefix, value
