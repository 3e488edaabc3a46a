"""Sealed models that silos sent for those who join: which of them the server may rely on.

The server cannot look into a snapshot, and the silo that made it may lie. What a silo seals afterwards is bound to the
chain of sums and states that it followed, so updates that start from the snapshot's version, or a later one, attest it:
a silo that begins with a snapshot wants them from so many silos that with its author they are half of all, or more.

| a snapshot is | when | links before it |
|---|---|---|
| candidate | it came | are kept |
| attested | enough others have committed updates that start from its version or a later one | are forgotten |
| relied on unattested | `WINDOW` links are kept | are forgotten: nobody can join until it is attested |
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
    """A sealed model.

    Args:
        silo: that made it.
        version: of the model.
        sealed: uint8 [bytes].
    """

    silo: str
    version: int
    sealed: Payload


class Snapshots:
    """The snapshot that joiners begin with, and a newer one that may take its place.

    Args:
        needed: silos, a snapshot's author among them, that must attest it.
    """

    def __init__(self, needed: int) -> None:
        self._needed = needed
        self.relied: KeptSnapshot | None = None
        self.candidate: KeptSnapshot | None = None
        self.attesters: set[str] = set()
        self._warned = False

    @property
    def newest(self) -> int:
        """Version of the newest; 0 where there is none, for with that the chain begins."""
        newest = self.candidate or self.relied
        return 0 if newest is None else newest.version

    def offer(self, snapshot: KeptSnapshot) -> None:
        """A silo sent one: the next candidate."""
        self.candidate, self.attesters = snapshot, {snapshot.silo}

    def attest(self, members: Iterable[Member]) -> None:
        """These updates were committed after the candidate."""
        if self.candidate is not None:
            self.attesters |= {one.silo for one in members if one.round >= self.candidate.version}

    def settle(self, links: int) -> KeptSnapshot | None:
        """The candidate, if it may be relied on from now on.

        Args:
            links: that are kept.
        """
        chosen = self.candidate
        if chosen is None:
            return None
        if len(self.attesters) < self._needed:
            if links <= WINDOW:
                return None
            if not self._warned:
                self._warned = True
                logger.warning(
                    "fewer than %d silos have attested a snapshot in %d versions: what is older is forgotten, and a "
                    "silo without a model can join only once they have",
                    *(self._needed, links),
                )
        self.relied, self.candidate = chosen, None
        return chosen
