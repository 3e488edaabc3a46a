"""Server's side of an encrypted run: adds encrypted updates and keeps the sums, without a key.

Only the silos have the model. The server keeps the commits since some version as a chain of *links*, and sends each
silo the links that it lacks. Links never change and are never merged, so all silos have the same model to the last bit.
A sum can be decrypted only if all its updates were quantised on one *grid* (same exponents). Silos agree on the next
grid once as many updates as the *quorum* are committed. Updates on the earlier grid then form a separate sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedsync.cipher.encoding import sealed_wire as wire
from fedsync.cipher.encoding.catch_up import CatchUp, LinkEntry, SignedSnapshot, Start, attesters
from fedsync.cipher.keys.keywrap import ServerKeys
from fedsync.cipher.masking.mask_roster import announced, least_survivors
from fedsync.cipher.masking.masks import own_seeds
from fedsync.cipher.masking.unmask import Announcements, Unmasking
from fedsync.cipher.plan import EncryptionPlan
from fedsync.cipher.server.chain import Chain, KeptSnapshot, Snapshots, members_of, total
from fedsync.cipher.server.inbox import Gathered, Inbox, usual_greetings
from fedsync.cipher.suites.suite import Adder, Member
from fedsync.common import foreign
from fedsync.common.errors import LaterVersion, PolicyError, ProtocolError, RunError
from fedsync.core.actions import Commit
from fedsync.core.orders import Subject, WorkOrder
from fedsync.core.state import Names, fill, named
from fedsync.model.chunked_arrays import ArrayKeeper
from fedsync.model.layout import Vector, as_bytes
from fedsync.model.transfer import NO_PAYLOAD, Payload

if TYPE_CHECKING:
    from fedsync.extras.tracing.evidence import Evidence

logger = foreign.logger(__name__)

MAX_LINKS = 48  # links kept before the server asks a silo for a snapshot, which replaces older links

# Content of a checkpoint: data from silos, without the construction arguments.
_NAMES: Names = {
    "first": "_chain.first",
    "links": "_chain.links",
    "paused": "_chain.paused",
    "held": "_held",
    "snapshot": "_snapshots.relied",
    "candidate": "_snapshots.candidate",
    "attesters": "_snapshots.attesters",
    "initial": "_initial",
    "calibrations": "_calibrations",
    "calibration": "_calibration",
    "scale": "_scale",
    "since_scale": "_since_scale",
    "savepoint": "_savepoint",
    "postponed": "_postponed",
    "announcements": "_announcements.here",
}

SUMS = "sums"

MAX_SNAPSHOT_EXTRA, _OF_A_TENSOR, _OF_A_SILO = 2**20, 512, 2048
"""Bound of a snapshot's bytes beside its models: a constant, and bytes for each tensor (exponents on remembered grids)
and each silo (serials of updates); see `ReplicaState.most_bytes`.
"""


def upload_bytes(plan: EncryptionPlan) -> int:
    annex = wire.MAX_ANNEX if plan.masked else 0
    return plan.chunks * plan.form.chunk_bytes + 4 * plan.clear_values + annex + 4096


class EncryptedAggregator:
    """`fedsync.model.transfer.Aggregator` without a key.

    Args:
        initial: version 0 in the clear, where silos cannot build it themselves.
        evidence: keeps single updates of the last versions on disk; None keeps none.
        folder: folder for sums and waiting updates; its content is removed. None keeps them in memory.
    """

    def __init__(
        self,
        plan: EncryptionPlan,
        keys: ServerKeys,
        initial: Vector | None = None,
        evidence: Evidence | None = None,
        folder: Path | None = None,
    ) -> None:
        self._plan, self._keys, self._adder, self._evidence = plan, keys, Adder(plan.form), evidence
        self._files = ArrayKeeper(folder)
        self._inbox = Inbox(plan, keys, self._files)
        self._chain = Chain()
        self._held: dict[str, int] = {}
        self._snapshots = Snapshots(attesters(len(keys.senders)))
        self._initial = None if initial is None else self._files.keep(as_bytes(initial))
        self._calibrations: dict[str, wire.Envelope] = {}
        self._calibration: Payload | None = None
        self._scale = self._since_scale = 0
        self._savepoint: int | None = None
        # Calls that follow once the masks of the newest sum are removed.
        self._postponed: list[Literal["rollback", "savepoint"]] = []
        self._made: dict[tuple[int, int, bytes], Payload] = {}
        self._announcements = Announcements()
        self._unmasking: tuple[Unmasking, LinkEntry, tuple[Member, ...]] | None = None
        self.upload_bytes, self.seals_figures = upload_bytes(plan), plan.seal_metrics

    # Joining silos, and catch-ups for them.

    def sum_bytes(self, members: int) -> int:
        from fedsync.extras.relays import sealed_sum

        annex = wire.MAX_ANNEX if self._plan.masked else 0
        return sealed_sum.most_bytes(members, self.upload_bytes, annex)

    def greet(self, silo: str, version: int, greeting: Payload | None) -> None:
        """Register a present silo; its greeting, the size of its updates, counts until the first order. Raise
        `ProtocolError` if a needed greeting is missing or malformed, or silo or version is unknown.
        """
        if self._calibration is not None and not self._plan.masked:
            self.holds(silo, version)
            return
        if greeting is None:
            raise ProtocolError(silo, "greeting", "it does not say how large its updates are")
        envelope = self._inbox.greeting(silo, greeting)
        self.holds(silo, version)
        if self._plan.masked:
            self.announce(silo, envelope.head.annex.hex())
        if self._calibration is None:
            self._calibrations[silo] = envelope

    def announce(self, silo: str, announcement: str) -> None:
        try:
            data = bytes.fromhex(announcement)
        except ValueError:
            raise ProtocolError(silo, "announcement", "it is not hexadecimal") from None
        announced(data, self._inbox.key_of(silo), silo)
        self._announcements.put(silo, data)

    def leave(self, silo: str) -> None:
        self._announcements.here.pop(silo, None)
        self.give_up(silo)

    def holds(self, silo: str, version: int) -> None:
        """Record the version that a silo holds; `ProtocolError` if the version or the silo does not exist.

        A version that no link continues, as after a restored disk, counts as none. The silo then gets the model from
        the beginning, or a snapshot.
        """
        self._inbox.key_of(silo)
        if not -1 <= version <= self._chain.newest:
            raise LaterVersion(silo, version, self._chain.newest)
        self._held[silo] = version if self._chain.continues(version) else -1

    def apart(self, order: WorkOrder) -> Payload:
        return NO_PAYLOAD

    def put_own(self, silo: str, model: Payload) -> None:
        raise ProtocolError(silo, "model", "none was requested")

    def own(self, silo: str) -> Payload:
        raise PolicyError("silos of an encrypted run send no models of their own")

    def outgoing(self, silo: str, subject: Subject = Subject.LAST) -> Payload:
        """A `CatchUp`, uint8 [bytes], from the version that the silo holds to the current version."""
        if self._unmasking is not None:
            raise PolicyError("the newest sum waits for silos to reveal their masks")
        if self._calibration is None:
            self._calibrate()
        held = self._held.setdefault(silo, -1)
        roster = self._announcements.roster(silo) if self._plan.masked else b""
        key = held, self._inbox.attempt(silo, self._chain.newest), roster
        if key not in self._made:
            self._made[key] = replace(self._catch_up(held), attempt=key[1], roster=roster).encode(self._files)
        return self._made[key]

    def _calibrate(self) -> None:
        if len(self._calibrations) < self._plan.members:
            raise PolicyError(f"{len(self._calibrations)} silos said how large their updates are, too few to add up")
        usual = usual_greetings(self._calibrations)
        if len(usual) < self._plan.members:
            raise RunError("silos have different models, runs or specifications, and too few agree to begin")
        self._calibration = self._total(usual[: self._plan.limit], 0, 1)  # silos that join later are in no calibration
        self._calibrations.clear()

    def _catch_up(self, held: int) -> CatchUp:
        chain, newest = self._chain, self._chain.newest
        if chain.continues(held):
            return CatchUp(Start.HELD, held, newest, chain.since(held))
        if held == -1 and chain.continues(0):
            given, calibration = (b"" if piece is None else piece for piece in (self._initial, self._calibration))
            start = Start.HELD if self._initial is None else Start.CLEAR
            return CatchUp(start, -1, newest, chain.since(0), given, calibration)
        kept = self._snapshots.relied
        if kept is None:
            raise PolicyError(f"no link begins at version {held}, and there is no snapshot")
        return CatchUp(Start.SNAPSHOT, kept.version, newest, chain.since(kept.version), kept.sealed)

    def from_the_beginning(self, version: int) -> Payload:
        """Catch-up up to ``version`` or the newest, uint8 [bytes]; `PolicyError` if links are forgotten."""
        found = self._catch_up(-1)
        if found.start is not Start.HELD:
            raise PolicyError("the first links are no longer stored")
        version = min(version, found.version)
        return replace(found, version=version, links=found.links[:version]).encode()

    def _total(self, envelopes: Sequence[wire.Envelope], version: int, chunks: int) -> Payload:
        plan, keys = self._plan, self._keys
        words, tag = total(envelopes, self._adder, plan.limit)
        first, members = envelopes[0].head, members_of(envelopes)
        head = wire.Head(
            wire.Kind.AGGREGATE, plan.form, plan.packing, "server", version, first.attempt, keys.epoch,
            keys.fingerprint, first.grid, chunks, members,
        )  # fmt: skip
        return self._files.write(head.nbytes, wire.unsigned(head, words, tag))

    # Arrival and commit of updates.

    def begin(self, update_id: str) -> None:
        self._inbox.begin(update_id, self._chain.newest, self._scale)

    def put(self, silo: str, update_id: str, update: Payload) -> None:
        self._inbox.put(silo, update_id, update)

    def put_sum(self, relay: str, update_ids: Sequence[str], payload: Payload) -> None:
        self._inbox.put_sum(relay, update_ids, payload)

    def commit(self, commit: Commit) -> None:
        """Add the updates of a commit; sealed values are already weighted, values in the clear are weighted here."""
        if commit.toward:
            raise PolicyError("a server without the model cannot move it towards the silos' models")
        updates = self._inbox.take(commit.weights, self._chain.newest)
        gathered = Gathered.of(updates, commit.weights, self._plan.clear_values, self._plan.clear_averages)
        version, chunks = self._chain.newest + 1, self._plan.chunks
        members = tuple(single.head.members[0] for single in gathered.singles)
        sums = tuple(self._total(envelopes, version, chunks) for _, envelopes in sorted(gathered.by_grid.items()))
        entry = LinkEntry(version, sums, self._files.keep(as_bytes(gathered.clear)))
        least = max(self._plan.members, least_survivors(self._plan.colluding) if self._plan.masked else 1)
        silos = len({member.silo for member in members})
        if silos < least:
            logger.warning("a sum of %d silos would disclose too much: the commit changes no model", silos)
            self._pause()
            return
        few = [each for each in map(members_of, gathered.by_grid.values()) if len({one.silo for one in each}) < least]
        for member in (one for each in few for one in each):
            self._inbox.leave_out(member.update_id, f"came late, in a sum of fewer than {least} silos (cipher.members)")
        if len(few) == len(sums):
            logger.warning("version %d changes no model: late updates need a sum of their own", version)
            self._chain.paused += 1
        if self._evidence is not None and not gathered.summed:
            roster = self._announcements.roster(gathered.singles[0].head.sender) if self._plan.masked else b""
            self._evidence.begin(version, gathered.singles, self._plan.members, bytes(entry.clear), roster)
        elif self._evidence is not None:
            self._evidence.without("regions' relays send sums")
        if self._plan.masked:
            annexes = {single.head.sender: single.head.annex for single in gathered.singles}
            self._unmasking = Unmasking(annexes, self._keys.senders, self._plan.colluding), entry, members
            self._close()
        else:
            self._add(entry, members)

    def _add(self, entry: LinkEntry, members: tuple[Member, ...]) -> None:
        self._chain.add(entry)
        if self._evidence is not None:
            self._evidence.settle(own_seeds(bytes(entry.reveals)) if self._plan.masked else {})
        self._since_scale += len(members)
        if self._since_scale >= self._plan.quorum:
            self._since_scale, self._scale = 0, self._scale + 1
        self._snapshots.attest(members)
        self._forget()
        self._renew()

    def _pause(self) -> None:
        self._chain.pause()
        self._renew()

    def _renew(self) -> None:
        self._made.clear()
        if self._plan.masked:
            self._announcements.renew()

    # Masks must be removed before a sum can be opened.

    @property
    def blocked(self) -> bool:
        return self._unmasking is not None

    def questions(self) -> dict[str, Payload]:
        return {} if self._unmasking is None else self._unmasking[0].questions()

    def answer(self, silo: str, answer: Payload) -> None:
        if self._unmasking is not None:  # else enough other silos have answered already
            self._unmasking[0].answer(silo, answer)
            self._close()

    def give_up(self, silo: str) -> None:
        if self._unmasking is not None:
            self._unmasking[0].give_up(silo)
            self._close()

    def _close(self) -> None:
        if self._unmasking is None:
            return
        unmasking, entry, members = self._unmasking
        opening = unmasking.opening() if unmasking.done else None
        if opening is None and not unmasking.done and not unmasking.closed:
            return
        self._unmasking = None
        if opening is None:
            logger.warning("masks cannot be removed: the commit does not change the model, and silos continue")
            self._pause()
        else:
            self._add(replace(entry, reveals=opening), members)
        self._carry_out_postponed()

    def keep_best(self, version: int) -> None:
        """Do nothing: silos have the models."""

    def notes(self) -> list[str]:
        rounds, why = self._chain.paused, "they held updates of too few silos for a sum, or masks could not be removed"
        paused = [f"commits that did not change the model, but count as rounds: {rounds}; {why}"] if rounds else []
        return paused + self._inbox.notes()

    def savepoint(self) -> None:
        if self.blocked:
            self._postponed.append("savepoint")
            return
        self._savepoint = self._chain.newest

    def rollback(self) -> None:
        if self.blocked:
            self._postponed.append("rollback")
            return
        self._chain.undo(self._savepoint or 0)
        self._savepoint = self._chain.newest
        self._renew()

    def _carry_out_postponed(self) -> None:
        postponed, self._postponed = self._postponed, []
        for call in postponed:
            {"rollback": self.rollback, "savepoint": self.savepoint}[call]()

    def discard(self, update_id: str) -> None:
        self._inbox.discard(update_id)

    # Snapshots keep the chain short.

    @property
    def wants_snapshot(self) -> bool:
        return self._chain.newest - self._snapshots.newest > max(MAX_LINKS, 3 * len(self._held))

    @property
    def snapshot_bytes(self) -> int:
        beside = _OF_A_TENSOR * len(self._plan.sealed.names) + _OF_A_SILO * len(self._keys.senders)
        return self._plan.layout.nbytes * self._plan.most_models + MAX_SNAPSHOT_EXTRA + beside

    def put_snapshot(self, silo: str, version: int, snapshot: Payload) -> None:
        """Keep a sealed model, once attested, for silos that hold no version at which links begin. Raise
        `ProtocolError` if the snapshot is too large, not signed by the silo, or of a version at which no link begins.
        """
        if snapshot.dtype != np.uint8 or len(snapshot) > self.snapshot_bytes:
            raise ProtocolError(silo, "snapshot", f"{len(snapshot)} bytes, at most {self.snapshot_bytes}")
        read = SignedSnapshot.read(snapshot.data, silo)
        if (read.author, read.version) != (silo, version) or not read.is_of(self._inbox.key_of(silo)):
            raise ProtocolError(silo, "snapshot", "not signed by this silo for this version")
        if not self._chain.continues(version):
            raise ProtocolError(silo, "snapshot", f"of version {version}, which is not among those kept")
        self._snapshots.offer(KeptSnapshot(silo, version, self._files.keep(snapshot)))
        self._forget()

    def _forget(self) -> None:
        kept = self._snapshots.settle(len(self._chain.links))
        if kept is None:
            return
        # Links since the savepoint must stay, or a rollback would be impossible.
        self._chain.forget(kept.version if self._savepoint is None else min(kept.version, self._savepoint))
        self._held = {silo: held if self._chain.continues(held) else -1 for silo, held in self._held.items()}
        self._made.clear()

    def state(self) -> Mapping[str, Any]:
        return {**named(self, _NAMES), "unmasking": self._unmasking is not None, "inbox": self._inbox.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from another aggregator's `state`. A sum that was being unmasked stays closed."""
        fill(self, _NAMES, state)
        if state["unmasking"]:
            self._pause()
            self._carry_out_postponed()
        self._inbox.restore(state["inbox"], self._chain.newest)
