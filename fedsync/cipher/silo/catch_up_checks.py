"""Checks at a silo of the server's catch-up messages (model changes), in three steps, before decryption.

1. *Decode*: every sum and the calibration are cut out and have the right form.
2. *Authenticate*: `Authenticator` verifies that every sum is what its members sealed.
3. *Place*: each link fits the links before it. Its updates are new, are enough, come from silos of the group, and start
   from versions that this silo knows. An UNDO link reverts the last added links.

Only data that passed all steps is opened, in `fedsync.cipher.silo.opening`. A silo can compute a version's digest D
(`history`) only after it has opened all links up to this version. So `alike_members` can tell only after opening which
updates come from silos with the same history as this silo.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedsync.cipher.encoding import sealed_wire as wire
from fedsync.cipher.encoding.catch_up import WINDOW, CatchUp, LinkEntry, LinkKind, Piece, attesters
from fedsync.cipher.encoding.fields import clear_values
from fedsync.cipher.encoding.integrity import Authentic, Authenticator
from fedsync.cipher.keys.keyring import Ring
from fedsync.cipher.masking.masks import Unmasker
from fedsync.cipher.plan import EncryptionPlan
from fedsync.cipher.silo.history import LinkRecords, added_content
from fedsync.cipher.silo.replica_state import SEEN, ReplicaState
from fedsync.cipher.suites.suite import Member
from fedsync.common.errors import SERVER, ProtocolError, SpoiledSum
from fedsync.model.layout import Vector, as_bytes


@dataclass(frozen=True, slots=True, eq=False)
class ReadEntry:
    """Additions of one version, with C in ``content`` and float32 [clear values] in ``clear``."""

    version: int
    content: bytes
    sums: tuple[Authentic, ...]
    clear: Vector
    unmasker: Unmasker | None
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ReadLink:
    """Link to the next version: see `fedsync.cipher.encoding.catch_up.Link`."""

    kind: LinkKind
    entries: tuple[ReadEntry, ...]

    @property
    def contents(self) -> tuple[tuple[int, bytes], ...]:
        return tuple((entry.version, entry.content) for entry in self.entries)


class CatchUpReader:
    """Reader of catch-ups in the run with digest R (``run``)."""

    def __init__(self, plan: EncryptionPlan, ring: Ring, authenticator: Authenticator, run: bytes) -> None:
        self._plan, self._ring, self._authenticator, self._run = plan, ring, authenticator, run
        # Silos that may lie: of two silos nobody can say which lies.
        self._lying = min(plan.colluding, (len(ring.group.members) - 1) // 2)

    def read(
        self, received: CatchUp, base: ReplicaState | None, author: str | None = None
    ) -> tuple[Authentic | None, tuple[ReadLink, ...]]:
        """Verify that silos sealed the whole catch-up; nothing is opened. `ProtocolError` if a part fails a check.
        ``base`` is the state that the catch-up continues, None for version 0. ``author`` made the snapshot that
        ``base`` is from. Return the calibration, if the catch-up begins with version 0, and the links.
        """
        decoded = None if base is not None else self._calibration(received.calibration)
        sums = [
            [[self._decode(one, entry.version, self._plan.chunks) for one in entry.sums] for entry in link.entries]
            for link in received.links
        ]
        calibration = None if decoded is None else self._authenticator.authenticate(decoded, SERVER)
        links = tuple(
            ReadLink(link.kind, tuple(map(self._entry, link.entries, envelopes)))
            for link, envelopes in zip(received.links, sums, strict=True)
        )
        if calibration is not None:
            others = sorted({member.silo for member in calibration.head.members if member.chain != self._run})
            if len(others) > self._lying:
                detail = f"{', '.join(others)} mean another run: another specification, name or key epoch"
                raise SpoiledSum(SERVER, "chain", detail)
        self._place(links, base)
        self.check_claims(links, {} if base is None else base.history.known(), base, author)
        return calibration, links

    def check_claims(
        self, links: Sequence[ReadLink], known: Mapping[int, bytes], base: ReplicaState | None, author: str | None
    ) -> None:
        """Check that others have the same past, and that enough silos attest a snapshot: its author may lie. ``known``
        are D of the versions that the silo has reached; other arguments are as for `read`. Raise `SpoiledSum` if a
        check fails.
        """
        added = [entry for link in links if link.kind is LinkKind.ADD for entry in link.entries]
        alike = alike_members([member for entry in added for member in entry.members], known, self._lying)
        if base is None or author is None:
            return
        found = len({one.silo for one in alike if one.round >= base.version} | {author})
        needed = attesters(len(self._ring.group.members))
        if found < needed:
            raise SpoiledSum(SERVER, "snapshot", f"{found} silos attest the snapshot of {author}, {needed} are needed")

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
        self._enough(members)
        return envelope

    def _decode(self, data: Piece, version: int, chunks: int) -> wire.Envelope:
        plan, group = self._plan, self._ring.group
        expected = wire.Expected(
            wire.Kind.AGGREGATE, plan.form, plan.packing, SERVER, version, None, group.epoch, group.fingerprint, None,
            chunks,
        )  # fmt: skip
        return wire.decode(data, expected)

    # Authenticate.

    def _entry(self, entry: LinkEntry, envelopes: Sequence[wire.Envelope]) -> ReadEntry:
        sums = tuple(self._authenticator.authenticate(one, SERVER) for one in envelopes)
        if self._plan.noise is not None and len(sums) != 1:
            raise ProtocolError(SERVER, "members", f"{len(sums)} sums, each with a part of a version's noise")
        clear = clear_values(entry.clear, self._plan.clear_values, SERVER)
        content = added_content([one.head for one in sums], as_bytes(clear).data)
        unmasker = self._unmasker(entry, sums) if self._plan.masked else None
        return ReadEntry(entry.version, content, sums, clear, unmasker, members_of(sums))

    @staticmethod
    def _unmasker(entry: LinkEntry, sums: Sequence[Authentic]) -> Unmasker:
        if len(sums) != 1:
            raise ProtocolError(SERVER, "reveals", f"{len(sums)} sums under masks of one round")
        return Unmasker(bytes(entry.reveals), sums[0].head.members)

    # Place.

    def _place(self, links: Sequence[ReadLink], base: ReplicaState | None) -> None:
        records = LinkRecords(0, ()) if base is None else base.history.records
        oldest = 0 if base is None else min(base.history.known())
        added = {} if base is None else dict(base.added)
        for link in links:
            if link.kind is LinkKind.UNDO and self._plan.optimizer is not None:
                detail = "a version cannot be undone: the optimizer's state before it is unknown"
                raise ProtocolError(SERVER, "undo", detail)
            following = records.after(link.kind, link.contents)
            if link.kind is LinkKind.ADD:
                (entry,) = link.entries
                if entry.version != following.newest:
                    raise ProtocolError(SERVER, "version", f"{entry.version} where {following.newest} is due")
                self._enough(entry.members)
                for member in entry.members:
                    admit(member, added, self._ring)
                    if not max(oldest, entry.version - WINDOW) <= member.round < entry.version:
                        detail = f"{member.update_id[:80]!r} started from {member.round}, which is no longer stored"
                        raise ProtocolError(SERVER, "chain", detail)
            records = following

    def _enough(self, members: Sequence[Member]) -> None:
        silos = len({member.silo for member in members})
        if silos < self._plan.members:
            detail = f"a sum of {silos} silos' updates, of {self._plan.members} at least there should be"
            raise ProtocolError(SERVER, "members", detail)


def check_alike(known: Mapping[int, bytes], others: Mapping[int, bytes]) -> None:
    for version in known.keys() & others.keys():
        if known[version] != others[version]:
            raise other_chain(version)


def alike_members(members: Sequence[Member], known: Mapping[int, bytes], lying: int) -> list[Member]:
    """Members that, as far as is ``known`` (D by version), have this silo's past.

    A silo may name any D under its tag. An update that names another D than this silo has is only ignored. But if more
    silos do so than may lie, this silo itself has another past: `SpoiledSum`.
    """
    others = {one.silo: one.round for one in members if known.get(one.round, one.chain) != one.chain}
    if len(others) > lying:
        raise other_chain(min(others.values()), sorted(others))
    return [one for one in members if known.get(one.round, one.chain) == one.chain]


def other_chain(version: int, silos: Sequence[str] = ("other silos",)) -> SpoiledSum:
    who = f"{', '.join(silos)} computed another version {version} than this silo"
    why = "from other sums, from another first model, or on another kind of processor"
    return SpoiledSum(SERVER, "chain", f"{who}: {why}")


def members_of(sums: Sequence[Authentic]) -> tuple[Member, ...]:
    return tuple(member for one in sums for member in one.head.members)


def admit(member: Member, added: dict[str, tuple[int, ...]], ring: Ring) -> None:
    """Record an update as added; raise `ProtocolError` for a repeated, too old or unknown update."""
    name, _, serial = member.update_id.rpartition("/")
    if name not in ring.group.members or not serial.isdecimal():
        raise ProtocolError(SERVER, "members", f"{member.update_id[:80]!r} is of no silo that has a key")
    seen, number = added.get(name, ()), int(serial)
    if number in seen or (len(seen) == SEEN and number < seen[0]) or number < 1:
        raise ProtocolError(SERVER, "members", f"{member.update_id[:80]!r} was added before")
    added[name] = tuple(sorted((*seen, number)))[-SEEN:]
