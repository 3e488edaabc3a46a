"""Chain of encrypted model changes (*links*, one per version) at the server, which adds updates without a key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedsync.cipher.encoding import sealed_wire as wire
from fedsync.cipher.encoding.catch_up import Link, LinkEntry, LinkKind
from fedsync.cipher.encoding.integrity import added
from fedsync.cipher.suites.suite import Adder, Member, Words
from fedsync.common.errors import PolicyError
from fedsync.model.chunked_arrays import give_back, spans


class Chain:
    """Links from version ``first`` to version ``newest``, one for each version. A link never changes. ``paused`` counts
    the versions by `pause`, which equal the version before.
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
