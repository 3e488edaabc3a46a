"""Two tables: one row a round, and one a silo and round."""

from __future__ import annotations

import csv
from pathlib import Path

from fedsync.core.errors import ConfigError
from fedsync.observe.ledger import Ledger
from fedsync.observe.round_feed import RoundFeed

ROUND_COLUMNS = ("round", "at_s", "seconds", "loss", "accuracy", "test_loss", "slowest", "silos", "samples")
SILO_COLUMNS = ("round", "silo", "batch_size", "steps", "samples", "compute_s", "overhead_s", "wait_s")


class CsvExporter:
    """Writes both while the run goes on. An unknown figure is an empty cell.

    Args:
        path: table of rounds; that of silos lies beside it, ``x-silos.csv`` for ``x.csv``.

    Raises:
        ConfigError: they cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._feed = RoundFeed()
        try:
            self._rounds_file = path.open("w", newline="", encoding="utf-8")
            self._silos_file = silos_beside(path).open("w", newline="", encoding="utf-8")
        except OSError as error:
            raise ConfigError(str(path), error.strerror or str(error), "Name a file that can be written") from error
        self._rounds = csv.writer(self._rounds_file)
        self._silos = csv.writer(self._silos_file)
        self._rounds.writerow(ROUND_COLUMNS)
        self._silos.writerow(SILO_COLUMNS)

    def follow(self, ledger: Ledger) -> None:
        """Write the rounds that are complete."""
        rows = self._feed.closed(ledger)
        for row in rows:
            samples = sum(share.samples for share in row.silos.values())
            scores = (row.loss, row.accuracy, row.test_loss)
            self._rounds.writerow((row.round, row.at_s, row.seconds, *scores, row.slowest, len(row.silos), samples))
            for name, share in row.silos.items():
                times = (share.compute_s, share.overhead_s, share.wait_s)
                self._silos.writerow((row.round, name, share.batch_size, share.steps, share.samples, *times))
        if rows:
            self._rounds_file.flush()
            self._silos_file.flush()

    def close(self) -> None:
        """Close both files."""
        self._rounds_file.close()
        self._silos_file.close()


def silos_beside(path: Path) -> Path:
    """The table of silos that belongs to a table of rounds."""
    return path.with_name(f"{path.stem}-silos{path.suffix}")
