"""A run's figures for other programs, written while the run goes on or from its journal afterwards.

An exporter sees the ledger after every entry, as a progress bar does. What one of them does wrong never ends a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from fedsync.common import foreign
from fedsync.common.files import OWNER_FOLDER
from fedsync.config.sections.exporter_section import ExportConfig
from fedsync.observe.ledger import Ledger

logger = foreign.logger(__name__)


class Exporter(Protocol):
    """Follows a run and passes it on."""

    def follow(self, ledger: Ledger) -> None:
        """The ledger has one more entry."""

    def close(self) -> None:
        """The run is over, or has failed; closing twice does no harm."""


class Guarded:
    """An exporter that falls silent after its first error, which it logs: training goes on.

    Args:
        kind: its name in the configuration.
        inner: the exporter.
    """

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
            # Anything: a full disk, a tracking server that is down, a bug in its client.
            self._broken = True
            logger.warning("export.%s failed and is off for the rest of the run: %r", self._kind, error)


def open_exporters(export: ExportConfig | None, out: Path, run: Mapping[str, Any]) -> list[Exporter]:
    """The exporters of a configuration, ready to follow.

    Args:
        export: the section; None opens none.
        out: folder of the run.
        run: what the run is, for trackers that list runs: the resolved strategy, and ``runtime``.

    Raises:
        ConfigError: one of them cannot begin: a library that is not installed, a port that is taken.
    """
    if export is None:
        return []
    out.mkdir(mode=OWNER_FOLDER, parents=True, exist_ok=True)
    made: list[Exporter] = []
    try:
        if export.tensorboard is not None:
            from fedsync.observe.exporters.tensorboard_exporter import TensorBoardExporter

            made.append(Guarded("tensorboard", TensorBoardExporter(out / export.tensorboard)))
        if export.mlflow is not None:
            from fedsync.observe.exporters.mlflow_exporter import MlflowExporter

            made.append(Guarded("mlflow", MlflowExporter(export.mlflow, run)))
        if export.prometheus is not None:
            from fedsync.observe.exporters.prometheus_exporter import PrometheusExporter

            made.append(Guarded("prometheus", PrometheusExporter(export.prometheus, out / "metrics.url")))
        if export.csv:
            from fedsync.observe.exporters.csv_exporter import CsvExporter

            # Last, for it takes the place of a table that may be there: by now nothing else can prevent the run.
            made.append(Guarded("csv", CsvExporter(out / "rounds.csv")))
    except BaseException:
        for exporter in made:
            exporter.close()
        raise
    return made
