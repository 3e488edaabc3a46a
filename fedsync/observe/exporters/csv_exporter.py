"""Three tables: one row a round, one a silo and round, and one a metric that silos report.

Names come from silos, and a spreadsheet takes a text that begins like a formula for one: such a text begins with an
apostrophe here. Numbers stay numbers.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from fedsync.common.errors import ConfigError
from fedsync.core.journal import open_private
from fedsync.observe.figures import ROUND, SHARE
from fedsync.observe.ledger import Ledger
from fedsync.observe.rounds import Round, RoundFeed

_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
"""How a text begins that a spreadsheet may take for a formula. Source: OWASP, CSV injection."""

TABLES = (
    ("round", "at_s", *ROUND, "slowest", "silos", "samples"),
    ("round", "silo", *SHARE),
    ("round", "silo", "metric", "value"),
)
"""Columns of each table."""


class CsvExporter:
    """Writes them while the run goes on. An unknown figure is an empty cell, and so is the silo of a whole round.

    Args:
        path: table of rounds; the others lie beside it, see `tables`.

    Raises:
        ConfigError: they cannot be written.
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
    """Cells of which no text is a formula."""
    return [f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell for cell in cells]


def tables(path: Path) -> tuple[Path, Path, Path]:
    """The tables of rounds, silos and metrics: ``x.csv``, ``x-silos.csv`` and ``x-metrics.csv``."""
    silos, metrics = (path.with_name(f"{path.stem}-{part}{path.suffix}") for part in ("silos", "metrics"))
    return path, silos, metrics
