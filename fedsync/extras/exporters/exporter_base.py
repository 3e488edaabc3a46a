"""Base of exporters, which send a run's metrics to other programs, during the run or afterwards from its journal.

An exporter sees the run's ledger (totals and rounds) after every journal entry. A failing exporter never ends a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedsync.common import foreign
from fedsync.common.files import OWNER_FOLDER
from fedsync.config.sections.strategy_sections import ExportConfig
from fedsync.observe.ledger import Ledger
from fedsync.observe.recorder import Exporter

logger = foreign.logger(__name__)


class Guarded:
    """Wrapper that logs the first error of an exporter and then disables the exporter, so training continues."""

    def __init__(self, kind: str, inner: Exporter) -> None:
        self._kind = kind
        self._inner = inner
        self._broken = False

    def follow(self, ledger: Ledger) -> None:
        self._guard(lambda: self._inner.follow(ledger))

    def close(self) -> None:
        self._guard(self._inner.close)

    def _guard(self, call: Callable[[], None]) -> None:
        if self._broken:
            return
        try:
            call()
        except Exception as error:
            # Any error: a full disk, an unreachable tracking server, a bug in its client.
            self._broken = True
            logger.warning("export.%s failed and is off for the rest of the run: %r", self._kind, error)


def open_exporters(export: ExportConfig, out: Path, run: Mapping[str, Any]) -> list[Exporter]:
    """Open the exporters of a configuration. Raises `ConfigError` if an exporter cannot start, for example because of a
    missing library or a used port.
    """
    out.mkdir(mode=OWNER_FOLDER, parents=True, exist_ok=True)
    made: list[Exporter] = []
    try:
        if export.tensorboard is not None:
            from fedsync.extras.exporters.tensorboard_exporter import TensorBoardExporter

            made.append(Guarded("tensorboard", TensorBoardExporter(out / export.tensorboard)))
        if export.mlflow is not None:
            from fedsync.extras.exporters.mlflow_exporter import MlflowExporter

            made.append(Guarded("mlflow", MlflowExporter(export.mlflow, run)))
        if export.prometheus is not None:
            from fedsync.extras.exporters.prometheus_exporter import PrometheusExporter

            made.append(Guarded("prometheus", PrometheusExporter(export.prometheus, out / "metrics.url")))
        if export.csv:
            from fedsync.extras.exporters.csv_exporter import CsvExporter

            # Last, because this overwrites existing tables: no other exporter can fail the start after this.
            made.append(Guarded("csv", CsvExporter(out / "rounds.csv")))
    except BaseException:
        for exporter in made:
            exporter.close()
        raise
    return made
