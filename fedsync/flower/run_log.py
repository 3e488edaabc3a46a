"""Log lines of a ServerApp, one a round, in Flower's own log, which ``flwr run --stream`` shows.

Flower keeps that log in the SuperLink's database. `kept_log` writes it to the run's folder, too, with times.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedsync.common import foreign
from fedsync.common.errors import FedSyncError
from fedsync.common.log_times import QuietFile
from fedsync.observe.fate import RUN_LOG
from fedsync.observe.ledger import Ledger
from fedsync.observe.rounds import Round

logger = foreign.logger("flwr.fedsync")
"""Below Flower's logger, whose handler writes what users see; others' messages of level INFO it does not."""

_LOG_BYTES = 10_000_000
_NAMED = 6
"""Silos of a round that a line names one by one."""


@contextmanager
def kept_log(folder: Path) -> Iterator[None]:
    """Have what this process logs in `RUN_LOG` of a run's folder as well, and a failure's traceback."""
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
    """Logs each round when it ends.

    Args:
        rounds: how many there may be when it begins, or None if something else bounds the run.
    """

    def __init__(self, rounds: int | None) -> None:
        self._rounds = rounds
        self._told: int | None = None
        self._news = 0

    def follow(self, ledger: Ledger) -> None:
        """Log what is new since the first time; the rounds that were there then are another process's."""
        known = len(ledger.rounds) if self._told is None else self._told
        for row in ledger.rounds[known:]:
            logger.info("%s", self._line(row, ledger))
        self._told = len(ledger.rounds)
        for news in ledger.lost.since(self._news):
            logger.warning("%s", news)
        self._news = ledger.lost.told

    def _line(self, row: Round, ledger: Ledger) -> str:
        figures = [ledger.loss_words(row), *([] if ledger.accuracy is None else [f"accuracy {ledger.accuracy:.4g}"])]
        rounds = ledger.steered.stop.get("rounds", self._rounds)
        of = "" if rounds is None else f"/{rounds}"
        return "; ".join([f"[ROUND {row.round}{of}] {row.seconds:.1f} s", *figures, _batches(row)])


def _batches(row: Round) -> str:
    """Batch sizes of the silos that are in it."""
    sizes = {name: share.batch_size for name, share in row.silos.items()}
    if len(sizes) > _NAMED:
        return f"{len(sizes)} silos with batches of {min(sizes.values())} to {max(sizes.values())}"
    return "batches " + ", ".join(f"{name} {size}" for name, size in sizes.items())
