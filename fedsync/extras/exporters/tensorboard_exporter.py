"""TensorBoard exporter, through tensorboardX."""

from __future__ import annotations

from pathlib import Path

from fedsync.common.errors import not_installed
from fedsync.observe.ledger import Ledger
from fedsync.observe.recorder import RoundFeed
from fedsync.observe.rounds import figures

_TAGS = {"loss": "train/loss", "accuracy": "test/accuracy", "test_loss": "test/loss"}


class TensorBoardExporter:
    """Exporter to an event file; steps are rounds, and the wall time is the run's own time, virtual or real. Raises
    `ConfigError` if tensorboardX is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise not_installed("export.tensorboard", "tensorboardX", "tensorboard") from error
        self._writer = SummaryWriter(str(folder))
        self._feed = RoundFeed()

    def follow(self, ledger: Ledger) -> None:
        rows = self._feed.closed(ledger)
        for row in rows:
            for name, value, silo in figures(row):
                tag = f"{name}/{silo}" if silo else _TAGS.get(name, f"round/{name}")
                self._writer.add_scalar(tag, value, row.round, walltime=row.at_s)
        if rows:
            self._writer.flush()

    def close(self) -> None:
        self._writer.close()
