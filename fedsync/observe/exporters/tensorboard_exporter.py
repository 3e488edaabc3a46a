"""Scalars for TensorBoard, by tensorboardX."""

from __future__ import annotations

from pathlib import Path

from fedsync.core.errors import not_installed
from fedsync.observe.ledger import Ledger
from fedsync.observe.round_feed import RoundFeed


class TensorBoardExporter:
    """Writes an event file; steps are rounds, and the relative time is that of the run, virtual or not.

    Args:
        folder: for the event file; made if it is missing.

    Raises:
        ConfigError: tensorboardX is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise not_installed("export.tensorboard", "tensorboardX", "tensorboard") from error
        self._writer = SummaryWriter(str(folder))
        self._feed = RoundFeed()

    def follow(self, ledger: Ledger) -> None:
        """Write the rounds that are complete."""
        rows = self._feed.closed(ledger)
        for row in rows:
            scalars = {
                "train/loss": row.loss,
                "test/accuracy": row.accuracy,
                "test/loss": row.test_loss,
                "round/seconds": row.seconds,
            }
            for name, share in row.silos.items():
                scalars[f"batch_size/{name}"] = share.batch_size
                scalars[f"compute_s/{name}"] = share.compute_s
                scalars[f"overhead_s/{name}"] = share.overhead_s
                scalars[f"wait_s/{name}"] = share.wait_s
            for tag, value in scalars.items():
                if value is not None:
                    self._writer.add_scalar(tag, value, row.round, walltime=row.at_s)
        if rows:
            self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()
