"""Replay of a run's journal: recomputation of all decisions, or of the run's totals (ledger)."""

from __future__ import annotations

from pathlib import Path

from fedsync.common.errors import FedSyncError
from fedsync.config.cluster import silos_at_start
from fedsync.config.strategy import StrategyConfig
from fedsync.core.coordinator import Coordinator
from fedsync.core.journal import JournalEntry, read_journal
from fedsync.core.journal import replay as replay_entries
from fedsync.observe.ledger import Ledger
from fedsync.observe.quality.evaluations import metrics_of


def replay(path: str | Path) -> list[JournalEntry]:
    """Feed the events of a journal to a new coordinator and check that it makes the same decisions.

    Raises:
        FedSyncError: the file is not a journal, or an entry replays differently; the message names the entry.
    """
    path = Path(path)
    header, entries = read_journal(path)
    config = StrategyConfig.model_validate(header["config"])
    silos = header["silos"]
    at_start = None if silos is None else silos_at_start(silos, virtual=header["runtime"] == "virtual")
    coordinator = Coordinator(config.policies(at_start))
    recorded = list(entries)
    for number, (old, new) in enumerate(zip(recorded, replay_entries(recorded, coordinator), strict=True), start=1):
        if old != new:
            raise FedSyncError(f"{path}: entry {number} replays differently:\n  was {old}\n  now {new}")
    return recorded


def read_ledger(path: Path) -> Ledger:
    """Compute the ledger of a journal file; `FedSyncError` if the file is not a journal."""
    header, entries = read_journal(path)
    ledger = Ledger.of(header, measured=metrics_of(header["config"]))
    for entry in entries:
        ledger.add(entry)
    return ledger
