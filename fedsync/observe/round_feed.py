"""Rounds for whoever follows a run, one at a time."""

from __future__ import annotations

from fedsync.observe.ledger import Ledger
from fedsync.observe.rounds import Round


class RoundFeed:
    """Hands out every round of a ledger once, as soon as its scores are known or cannot come any more."""

    def __init__(self) -> None:
        self._next = 0

    def closed(self, ledger: Ledger) -> list[Round]:
        """Rounds that were not handed out before, in order."""
        begin, self._next = self._next, ledger.closed(self._next)
        return ledger.rounds[begin : self._next]
