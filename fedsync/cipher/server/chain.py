"""Sums of sealed updates, and the chain in which the server keeps them; nothing here needs a key."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fedsync.cipher.encoding import wire
from fedsync.cipher.encoding.integrity import added
from fedsync.cipher.plan import EncryptionPlan
from fedsync.cipher.suites.suite import Adder, Member, Words
from fedsync.core.errors import PolicyError
from fedsync.core.layout import Vector


@dataclass(frozen=True, slots=True)
class Sum:
    """Sealed updates of one attempt on one grid, added up. Never changed once it is part of a link."""

    grid: bytes
    attempt: int
    words: Words
    members: tuple[Member, ...]
    tag: wire.Tag


@dataclass(frozen=True, slots=True)
class LinkGroup:
    """As `catch_up.SumGroup`; ``updates`` are those of each version."""

    sign: int
    versions: int
    updates: int
    sums: tuple[Sum, ...]
    clear: Vector
    reveals: bytes = b""


@dataclass(frozen=True, slots=True)
class Link:
    """Leads from version ``base`` to ``version``; ``last`` before silos agree on another grid."""

    base: int
    version: int
    groups: tuple[LinkGroup, ...]
    last: bool = False


class Adding:
    """Adds sums and joins links, as a plan allows.

    Args:
        plan: how updates are sealed.
        adder: of its suite.
    """

    def __init__(self, plan: EncryptionPlan, adder: Adder) -> None:
        self._plan = plan
        self._adder = adder

    def total(self, envelopes: Sequence[wire.Envelope]) -> Sum:
        """The sum of updates on one grid.

        Raises:
            PolicyError: more than can be opened.
        """
        if len(envelopes) > self._plan.limit:
            raise PolicyError(f"{len(envelopes)} updates in one sum, at most {self._plan.limit} can be opened")
        words = envelopes[0].words.copy()
        tag = envelopes[0].tag
        for envelope in envelopes[1:]:
            self._adder.add(words, envelope.words)
            tag = added(tag, envelope.tag)
        members = tuple(envelope.head.members[0] for envelope in envelopes)
        head = envelopes[0].head
        return Sum(head.grid, head.attempt, words, members, tag)

    def shortened(self, links: Sequence[Link], between: Collection[int]) -> list[Link]:
        """The chain with neighbouring links added up wherever one sum can hold both.

        Args:
            links: each begins where the one before ends.
            between: versions at which a link must end, for somebody stands there.
        """
        short: list[Link] = []
        for link in links:
            before = short[-1] if short else None
            joined = None if before is None or before.version in between else self._joined(before, link)
            if joined is None:
                short.append(link)
            else:
                short[-1] = joined
        return short

    def _joined(self, first: Link, second: Link) -> Link | None:
        """One link in place of two, or None where they cannot be added up.

        Only where every silo weighs the same and the commits had equally many updates is the mean of a sum the
        sum of the means.
        """
        weighting = self._plan.weighting
        if (
            first.last
            or weighting.by != "silo"
            or weighting.normalised
            or len(first.groups) != 1
            or len(second.groups) != 1
        ):
            return None
        one, two = first.groups[0], second.groups[0]
        alike = (
            not one.reveals
            and one.sign == two.sign == 1
            and one.updates == two.updates
            and len(one.sums) == len(two.sums) == 1
        )
        if not alike or one.sums[0].grid != two.sums[0].grid:
            return None
        a, b = one.sums[0], two.sums[0]
        if len(a.members) + len(b.members) > self._plan.limit:
            return None
        words = a.words.copy()
        self._adder.add(words, b.words)
        total = Sum(a.grid, a.attempt, words, a.members + b.members, added(a.tag, b.tag))
        group = LinkGroup(1, one.versions + two.versions, one.updates, (total,), one.clear + two.clear)
        return Link(first.base, second.version, (group,), second.last)
