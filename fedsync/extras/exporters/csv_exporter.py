"""CSV exporter with three tables: rounds, silos per round, and metrics that silos report.

Names come from silos, and a spreadsheet executes a text that begins like a formula. An apostrophe is put before
such texts. Numbers stay numbers.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from fedsync.common.errors import ConfigError
from fedsync.core.journal import open_private
from fedsync.observe.ledger import Ledger
from fedsync.observe.recorder import RoundFeed
from fedsync.observe.rounds import ROUND, SHARE, Round

_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
"""Prefixes of texts that a spreadsheet may read as a formula. Source: OWASP, CSV injection."""

TABLES = (
    ("round", "at_s", *ROUND, "slowest", "silos", "samples"),
    ("round", "silo", *SHARE),
    ("round", "silo", "metric", "value"),
)


class CsvExporter:
    """Exporter to CSV files during the run.

    An unknown figure is an empty cell. Metrics of a whole round have an empty silo.

    ``path``: table of rounds; the paths of the other tables derive from it, see `tables`. Raises `ConfigError` if a
    table cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._feed = RoundFeed()
        self._files = ExitStack()
        try:
            self._tables = [self._files.enter_context(open_private(table, newline="")) for table in tables(path)]
        except OSError as error:
            self.close()
            raise ConfigError(str(path), error.strerror or str(error), "Name a file that can be written") from error
        self._rounds, self._silos, self._metrics = (csv.writer(file) for file in self._tables)
        for table, columns in zip((self._rounds, self._silos, self._metrics), TABLES, strict=True):
            table.writerow(columns)

    def follow(self, ledger: Ledger) -> None:
        rows = self._feed.closed(ledger)
        for row in rows:
            self._write(row)
        if rows:
            for file in self._tables:
                file.flush()

    def close(self) -> None:
        self._files.close()

    def _write(self, row: Round) -> None:
        samples = sum(share.samples for share in row.silos.values())
        own = [getattr(row, name) for name in ROUND]
        self._rounds.writerow(without_formulas((row.round, row.at_s, *own, row.slowest, len(row.silos), samples)))
        self._metrics.writerows(without_formulas((row.round, "", *metric)) for metric in row.metrics.items())
        for name, share in row.silos.items():
            self._silos.writerow(without_formulas((row.round, name, *(getattr(share, figure) for figure in SHARE))))
            self._metrics.writerows(without_formulas((row.round, name, *metric)) for metric in share.metrics.items())


def without_formulas(cells: Iterable[object]) -> list[object]:
    return [f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell for cell in cells]


def tables(path: Path) -> tuple[Path, Path, Path]:
    """Return the paths for rounds, silos and metrics: ``x.csv``, ``x-silos.csv`` and ``x-metrics.csv``."""
    if not path.name:
        raise ConfigError(str(path), "this is a folder", "Name a file that can be written")
    silos, metrics = (path.with_name(f"{path.stem}-{part}{path.suffix}") for part in ("silos", "metrics"))
    return path, silos, metrics
