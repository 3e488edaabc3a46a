"""Snapshots: encrypted models that silos upload for joining silos, and the server's choice of a reliable snapshot.

The server cannot read a snapshot, and its author may lie. Committed updates that start from the snapshot's version, or
a later version, attest it. Their silos and the author must be at least half of all silos. A silo that joins gets a
snapshot, and the links after the snapshot's version.

| state of a snapshot | condition | links up to its version |
|---|---|---|
| candidate | it arrived | are kept |
| attested | enough other silos have committed updates that start from its version or a later one | are forgotten |
| used though unattested | more than `WINDOW` links are kept | are forgotten: nobody can join until it is attested |
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fedsync.cipher.encoding.catch_up import WINDOW
from fedsync.cipher.suites.suite import Member
from fedsync.common import foreign
from fedsync.model.transfer import Payload

logger = foreign.logger(__name__)


@dataclass(frozen=True, slots=True)
class KeptSnapshot:
    """Sealed model of a silo, uint8 [bytes]."""

    silo: str
    version: int
    sealed: Payload


class Snapshots:
    """Snapshot that joining silos begin with, and a newer candidate; ``needed`` silos must attest, author included."""

    def __init__(self, needed: int) -> None:
        self._needed = needed
        self.relied: KeptSnapshot | None = None
        self.candidate: KeptSnapshot | None = None
        self.attesters: set[str] = set()
        self._warned = False

    @property
    def newest(self) -> int:
        newest = self.candidate or self.relied
        return 0 if newest is None else newest.version

    def offer(self, snapshot: KeptSnapshot) -> None:
        self.candidate, self.attesters = snapshot, {snapshot.silo}

    def attest(self, members: Iterable[Member]) -> None:
        if self.candidate is not None:
            self.attesters |= {one.silo for one in members if one.round >= self.candidate.version}

    def settle(self, links: int) -> KeptSnapshot | None:
        """Return the candidate if it may be relied on from now on; ``links`` is the number of kept links."""
        chosen = self.candidate
        if chosen is None:
            return None
        if len(self.attesters) < self._needed:
            if links <= WINDOW:
                return None
            if not self._warned:
                self._warned = True
                then = "older sums are no longer stored, and a silo without a model can join only after this"
                told = "fewer than %d silos have attested a snapshot in %d versions: %s"
                logger.warning(told, self._needed, links, then)
        self.relied, self.candidate = chosen, None
        return chosen
