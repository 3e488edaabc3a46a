"""Chain of encrypted model changes (*links*, one per version) at the server, and the snapshots from which silos join.

The server adds updates without a key. A *snapshot* is an encrypted model that a silo uploads for joining silos. The
server cannot read it, and its author may lie. Committed updates that start from the snapshot's version, or a later
version, attest it. Their silos and the author must be at least half of all silos. A silo that joins gets a snapshot,
and the links after the snapshot's version.

| state of a snapshot | condition | links up to its version |
|---|---|---|
| candidate | it arrived | are kept |
| attested | enough other silos have committed updates that start from its version or a later one | are forgotten |
| used though unattested | more than `WINDOW` links are kept | are forgotten: nobody can join until it is attested |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from fedsync.cipher.encoding import sealed_wire as wire
from fedsync.cipher.encoding.catch_up import WINDOW, Link, LinkEntry, LinkKind
from fedsync.cipher.encoding.integrity import added
from fedsync.cipher.suites.suite import Adder, Member, Words
from fedsync.common import foreign
from fedsync.common.errors import PolicyError
from fedsync.model.chunked_arrays import give_back, spans
from fedsync.model.transfer import Payload

logger = foreign.logger(__name__)


class Chain:
    """Links from version ``first`` to version ``newest``, one for each version. A link never changes. ``paused`` counts
    the versions that equal the version before.
    """

    def __init__(self) -> None:
        self.first = 0
        self.links: list[Link] = []
        self.paused = 0

    @property
    def newest(self) -> int:
        return self.first + len(self.links)

    def continues(self, version: int) -> bool:
        return self.first <= version <= self.newest

    def since(self, version: int) -> tuple[Link, ...]:
        return tuple(self.links[version - self.first :])

    def add(self, entry: LinkEntry) -> None:
        self.links.append(Link(LinkKind.ADD, (entry,)))

    def pause(self) -> None:
        self.links.append(Link(LinkKind.EMPTY))
        self.paused += 1

    def undo(self, back_to: int) -> None:
        """Add a version that reverts all since ``back_to``; `PolicyError` if a part is forgotten, or an UNDO link."""
        if not self.continues(back_to):
            raise PolicyError(f"version {back_to} cannot be restored: later sums are no longer stored")
        links = [link for link in reversed(self.since(back_to)) if link.kind is not LinkKind.EMPTY]
        if any(link.kind is not LinkKind.ADD for link in links):
            raise PolicyError(f"version {back_to} cannot be restored: a later version already undid another")
        entries = tuple(link.entries[0] for link in links)
        self.links.append(Link(LinkKind.UNDO if entries else LinkKind.EMPTY, entries))

    def forget(self, before: int) -> None:
        self.links = self.links[before - self.first :]
        self.first = before


def total(envelopes: Sequence[wire.Envelope], adder: Adder, limit: int) -> tuple[Iterator[Words], wire.Tag]:
    """Sum of updates or regions' sums on one grid: words span by span, added on demand, and the tag."""
    count = sum(len(envelope.head.members) for envelope in envelopes)
    if count > limit:
        raise PolicyError(f"{count} updates in one sum, at most {limit} can be decrypted")
    tag = envelopes[0].tag
    for envelope in envelopes[1:]:
        tag = added(tag, envelope.tag, adder.form)
    return _spans([envelope.words for envelope in envelopes], adder), tag


def members_of(envelopes: Sequence[wire.Envelope]) -> tuple[Member, ...]:
    members = tuple(member for envelope in envelopes for member in envelope.head.members)
    alone = len(members) == len(envelopes)
    return members if alone else tuple(sorted(members, key=lambda member: member.update_id))


def _spans(updates: Sequence[Words], adder: Adder) -> Iterator[Words]:
    for start, stop in spans(len(updates[0]), adder.form.chunk_bytes):
        words = updates[0][start:stop].copy()
        for update in updates[1:]:
            adder.add(words, update[start:stop])
        give_back(*updates)
        yield words


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
