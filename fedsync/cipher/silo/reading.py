"""What the server sends, read in three steps, before anything of it is opened.

1. *Decode*: every sum, the calibration and what travels in the clear are cut out and have the right form.
2. *Authenticate*: every sum is what its members sealed, by `Authenticator`. What they say of themselves is true from
   here on, or their own lie.
3. *Place*: each link fits those before it. Members are silos of the group, new, enough, and built on versions that this
   silo knows; what is taken back was added last.

Only what passed all of it is opened, in `fedsync.cipher.silo.opening`: whoever can make a silo decrypt what no silo
sealed, and sees whether that goes well, learns the key bit by bit.

Of versions that the catch-up itself leads to, a silo computes D only after it opened what led there. So members that
built on them are taken at their word until then: `ReadCatchUp.claimed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedsync.cipher.encoding import wire
from fedsync.cipher.encoding.catch_up import WINDOW, CatchUp, LinkEntry, LinkKind, Piece, attesters
from fedsync.cipher.encoding.integrity import Authenticator
from fedsync.cipher.keys.keyring import Ring
from fedsync.cipher.masking.masks import Unmasker
from fedsync.cipher.plan import EncryptionPlan
from fedsync.cipher.silo.history import LinkRecords, added_content
from fedsync.cipher.silo.replica_state import SEEN, ReplicaState
from fedsync.cipher.suites.suite import Member
from fedsync.core.errors import SERVER, ProtocolError, SpoiledSum
from fedsync.core.layout import Vector


@dataclass(frozen=True, slots=True, eq=False)
class ReadEntry:
    """What one version added.

    Args:
        version: that it led to.
        content: C.
        sums: on one grid each.
        clear: float32 [clear values].
        unmasker: takes the masks off, if there are any.
    """

    version: int
    content: bytes
    sums: tuple[wire.Envelope, ...]
    clear: Vector
    unmasker: Unmasker | None

    @property
    def members(self) -> tuple[Member, ...]:
        return tuple(member for one in self.sums for member in one.head.members)


@dataclass(frozen=True, slots=True, eq=False)
class ReadLink:
    """What leads to the next version: see `fedsync.cipher.encoding.catch_up.Link`."""

    kind: LinkKind
    entries: tuple[ReadEntry, ...]

    @property
    def contents(self) -> tuple[tuple[int, bytes], ...]:
        """Version and content of each entry."""
        return tuple((entry.version, entry.content) for entry in self.entries)


@dataclass(frozen=True, slots=True, eq=False)
class ReadCatchUp:
    """A catch-up of which all is what silos sealed.

    Args:
        calibration: where it begins with version 0.
        links: in order.
        claimed: D of versions, as members named it that built on them; to be compared once the silo is there.
    """

    calibration: wire.Envelope | None
    links: tuple[ReadLink, ...]
    claimed: dict[int, bytes]


class CatchUpReader:
    """Reads what the server sends.

    Args:
        plan: how updates are sealed.
        ring: the silo's keys.
        authenticator: of the plan's suite.
        run: R, see `fedsync.cipher.silo.history`.
    """

    def __init__(self, plan: EncryptionPlan, ring: Ring, authenticator: Authenticator, run: bytes) -> None:
        self._plan = plan
        self._ring = ring
        self._authenticator = authenticator
        self._run = run

    def read(self, received: CatchUp, base: ReplicaState | None, author: str | None = None) -> ReadCatchUp:
        """All of it, once all of it is known to be what silos sealed; nothing is opened.

        Args:
            received: the catch-up.
            base: the state that it continues; None where it begins with version 0.
            author: of the snapshot that ``base`` is from.

        Raises:
            ProtocolError: a piece of it is not in order.
        """
        calibration = None if base is not None else self._calibration(received.calibration)
        links = tuple(
            ReadLink(link.kind, tuple(self._entry(entry) for entry in link.entries)) for link in received.links
        )
        sums = [one for link in links for entry in link.entries for one in entry.sums]
        for envelope in sums if calibration is None else [calibration, *sums]:
            self._authenticator.authenticate(envelope, SERVER)
        claimed = self._place(links, base)
        if base is not None and author is not None:
            self._attested(links, base.version, author)
        return ReadCatchUp(calibration, links, claimed)

    # Decode.

    def _calibration(self, data: Piece) -> wire.Envelope:
        envelope = self._decode(data, 0, 1)
        members = envelope.head.members
        first = self._ring.group.conceal(self._plan.grid(self._plan.first_exponents).digest)
        if envelope.head.grid != first or envelope.head.attempt:
            raise ProtocolError(SERVER, "calibration", "made for another model, or another number of bits")
        for member in members:
            if member.silo not in self._ring.group.members or member.update_id != f"{member.silo}/0" or member.round:
                raise ProtocolError(SERVER, "members", f"{member.update_id[:80]!r} is no calibration of a silo")
            if member.chain != self._run:
                detail = f"{member.silo!r} means another run: another specification, name or key epoch"
                raise ProtocolError(SERVER, "chain", detail)
        self._enough(members)
        return envelope

    def _entry(self, entry: LinkEntry) -> ReadEntry:
        sums = tuple(self._decode(one, entry.version, self._plan.chunks) for one in entry.sums)
        clear = clear_values(entry.clear, self._plan.clear_values)
        return ReadEntry(entry.version, added_content(sums, entry.clear), sums, clear, self._unmasker(entry, sums))

    def _unmasker(self, entry: LinkEntry, sums: Sequence[wire.Envelope]) -> Unmasker | None:
        if not self._plan.masked:
            return None
        if len(sums) != 1:
            raise ProtocolError(SERVER, "reveals", f"{len(sums)} sums under masks of one round")
        return Unmasker(bytes(entry.reveals), sums[0].head.members)

    def _decode(self, data: Piece, version: int, chunks: int) -> wire.Envelope:
        plan, group = self._plan, self._ring.group
        expected = wire.Expected(
            wire.Kind.AGGREGATE, plan.form, plan.packing, SERVER, version, None, group.epoch, group.fingerprint, None,
            chunks,
        )  # fmt: skip
        return wire.decode(data, expected)

    # Place.

    def _place(self, links: Sequence[ReadLink], base: ReplicaState | None) -> dict[int, bytes]:
        """See that links fit those before them; what members say of versions that are not reached yet."""
        records = LinkRecords(0, ()) if base is None else base.history.records
        known = {} if base is None else base.history.known()
        added = {} if base is None else dict(base.added)
        claimed: dict[int, bytes] = {}
        for link in links:
            following = records.after(link.kind, link.contents)
            if link.kind is LinkKind.ADD:
                (entry,) = link.entries
                if entry.version != following.newest:
                    raise ProtocolError(SERVER, "version", f"{entry.version} where {following.newest} is due")
                self._enough(entry.members)
                for member in entry.members:
                    admit(member, added, self._ring)
                    self._built_on(member, following.newest, known, claimed)
            records = following
        return claimed

    def _enough(self, members: Sequence[Member]) -> None:
        silos = len({member.silo for member in members})
        if silos < self._plan.members:
            detail = f"a sum of {silos} silos' updates, of {self._plan.members} at least there should be"
            raise ProtocolError(SERVER, "members", detail)

    @staticmethod
    def _built_on(member: Member, version: int, known: dict[int, bytes], claimed: dict[int, bytes]) -> None:
        """See that a member of the link to ``version`` started from a version that led there."""
        oldest = max(min(known, default=0), version - WINDOW)
        if not oldest <= member.round < version:
            detail = f"{member.update_id[:80]!r} started from version {member.round}, which is not remembered"
            raise ProtocolError(SERVER, "chain", detail)
        if member.chain != (known.get(member.round) or claimed.setdefault(member.round, member.chain)):
            raise other_chain(member.round)

    def _attested(self, links: Sequence[ReadLink], version: int, author: str) -> None:
        """See that enough silos have built on the snapshot of ``version``: its author may lie."""
        added = (entry for link in links if link.kind is LinkKind.ADD for entry in link.entries)
        silos = {member.silo for entry in added for member in entry.members if member.round >= version}
        found, needed = len(silos | {author}), attesters(len(self._ring.group.members))
        if found < needed:
            detail = f"{found} silos stand for it, {needed} must"
            raise ProtocolError(SERVER, "snapshot", detail)


def other_chain(version: int) -> SpoiledSum:
    """Silos that come to one version by different ways."""
    detail = (
        f"other silos did not come to version {version} as this one did: by other sums, from another first model, or "
        f"with arithmetic of another kind of processor"
    )
    return SpoiledSum(SERVER, "chain", detail)


def admit(member: Member, added: dict[str, tuple[int, ...]], ring: Ring) -> None:
    """Put an update of a silo that has a key down as added, if it was not before.

    Raises:
        ProtocolError: it was, or is so old that it cannot be told.
    """
    name, _, serial = member.update_id.rpartition("/")
    if name not in ring.group.members or not serial.isdecimal():
        raise ProtocolError(SERVER, "members", f"{member.update_id[:80]!r} is of no silo that has a key")
    seen, number = added.get(name, ()), int(serial)
    if number in seen or (len(seen) == SEEN and number < seen[0]) or number < 1:
        raise ProtocolError(SERVER, "members", f"{member.update_id[:80]!r} was added before")
    added[name] = tuple(sorted((*seen, number)))[-SEEN:]


def clear_values(data: Piece, size: int) -> Vector:
    """Values that travel in the clear, float32 [size].

    Raises:
        ProtocolError: another number of them, or not finite.
    """
    if len(data) != 4 * size:
        raise ProtocolError(SERVER, "length", f"{len(data)} bytes in the clear, not {4 * size}")
    values = np.frombuffer(data, dtype="<f4").astype(np.float32)
    if not np.isfinite(values).all():
        raise ProtocolError(SERVER, "finite", "values in the clear are not finite")
    return values
