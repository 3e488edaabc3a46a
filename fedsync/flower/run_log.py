"""Log of a ServerApp: one line per round in Flower's own log, which ``flwr run --stream`` shows."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedsync.common import foreign
from fedsync.common.errors import FedSyncError
from fedsync.common.log_times import QuietFile
from fedsync.observe.ledger import Ledger
from fedsync.observe.rounds import Round
from fedsync.observe.run_state import RUN_LOG

logger = foreign.logger("flwr.fedsync")
"""A child of Flower's logger, whose handler shows INFO messages only of its own tree."""

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
