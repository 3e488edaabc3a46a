"""Extension hooks of the server's driver (main loop): the base class of features that act during a run.

The driver calls the hooks of its run's extensions in their order. See `fedsync.core.extension` for features that take
part in decisions. Only extensions of the driver may write files and read clocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedsync.core.actions import KeepBest
from fedsync.core.events import Event
from fedsync.core.journal import JournalEntry


class DriverExtension:
    """Base class of optional features of the driver. Hooks do nothing by default; a feature overrides some of them."""

    def events(self, now_s: float) -> Sequence[Event]:
        """Return new events for the coordinator, called at each turn; ``now_s`` is in seconds since the run began."""
        return ()

    def on_version(self, version: int) -> None:
        """React to a new version of the model, from a commit or a rollback; version 0 is the first model."""

    def on_best(self, best: KeepBest) -> None:
        """React to a version that has become the best; a resumed run repeats it."""

    def on_saved(self, entry: JournalEntry) -> None:
        """React to a journal entry that a checkpoint contains, and whose messages to silos are sent."""

    def on_idle(self) -> None:
        """Use a turn in which nothing has happened."""

    def close(self) -> None:
        """End with the run, also where it has failed."""
