"""Search for the silo that corrupted a version: decryption of single updates at one silo, with the owners' consent.

An update is opened only if its silo signed it, it belongs to the version, and its tag fits: a silo decrypts only data
that silos encrypted. Then the update must be what an honest silo may send:

| failed check | fault |
|---|---|
| tag | no sum with it is authentic, at any silo |
| chain | it was built on another history than the examining silo's |
| grid | it was sealed on a grid that silos did not agree on |
| masks | the two silos of a mask committed to different seeds, or the seeds are not those committed to |
| count, weights, progress, votes, evaluation | its header is not that of a single silo |
| clipping | a value exceeds the clipping range |
| filling | there are values behind the last value of the model |
| size | with the header's weight and progress, the model would change by more than `MOST` |

The report on an update has only its failed checks, and its largest value relative to the clipping limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fedsync.cipher.encoding import sealed_wire as wire
from fedsync.cipher.encoding import tally
from fedsync.cipher.encoding.integrity import Authentic, Authenticator
from fedsync.cipher.keys.keyring import Ring
from fedsync.cipher.keys.material import Purpose
from fedsync.cipher.masking.annex import Annex, Seeds
from fedsync.cipher.masking.masks import Masked, Unmasker, pack_opening
from fedsync.cipher.plan import EncryptionPlan
from fedsync.cipher.silo.opening import MOST
from fedsync.cipher.silo.replica_state import ReplicaState
from fedsync.cipher.silo.sealing import Serial, open_portions
from fedsync.cipher.suites.suite import Sealer
from fedsync.common.errors import SERVER, ProtocolError
from fedsync.extras.tracing.consent import Consent
from fedsync.extras.tracing.notice import Notice


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of the examination of one update.

    Args:
        silo: silo of the update.
        faults: failed checks.
        largest: largest value, relative to the clipping limit; None where the update was not opened.
        unexamined: reason why an update without known faults was not opened; else empty.
    """

    silo: str
    update_id: str
    faults: tuple[str, ...] = ()
    largest: float | None = None
    unexamined: str = ""


class Tracer:
    """Examiner of updates at one silo; ``state`` is the silo's state of the run."""

    def __init__(self, plan: EncryptionPlan, ring: Ring, sealer: Sealer, state: ReplicaState) -> None:
        self._plan = plan
        self._ring = ring
        self._sealer = sealer
        self._state = state
        self._authenticator = Authenticator(ring.group.derive(Purpose.TAG), plan.form)
        self._grids = state.scales.grids(plan, ring.group)

    def trace(
        self, notice: Notice, consents: Mapping[str, Consent], updates: Iterable[tuple[str, memoryview]]
    ) -> list[Finding]:
        """Examine each update of a version, checked by `Notice.known`; raise `ProtocolError` if it fits another plan.

        ``consents`` are the counting consents by silo; ``updates`` are id and message of each update, from the server.
        """
        head, plan = notice.head, self._plan
        if (head.form, head.packing, head.chunks) != (plan.form, plan.packing, plan.chunks):
            raise ProtocolError(SERVER, "notice", "its updates are of another suite, model or number of bits")
        given = dict(updates)
        annexes = _annexes(notice) if plan.masked else {}
        return [self._examine(one, given.get(_id(one)), notice, annexes, consents) for one in notice.updates]

    def _examine(
        self,
        slip: wire.Envelope,
        message: memoryview | None,
        notice: Notice,
        annexes: Mapping[str, Annex],
        consents: Mapping[str, Consent],
    ) -> Finding:
        silo = slip.head.sender
        found = Finding(silo, _id(slip))
        if message is None:
            return replace(found, unexamined="the server has not given it out")
        try:
            envelope = self._read(slip, message)
        except ProtocolError:
            return replace(found, unexamined="what the server gave out is not what the silo signed")
        faults = self._outside(envelope.head)
        try:
            authentic = self._authenticator.authenticate(envelope, silo)
        except ProtocolError as error:
            return replace(found, faults=(error.check, *faults))
        sealer = self._sealer
        if self._plan.masked:
            others = _at_odds(silo, annexes)
            faults += [f"masks with {', '.join(others)}"] if others else []
            consent = consents.get(silo)
            if consent is None:
                return replace(found, faults=tuple(faults), unexamined="its owner has not consented to unmask it")
            try:
                sealer = Masked(sealer, self._unmasker(envelope, notice, consent).unmask)
            except ProtocolError:
                why = "the seeds of its masks are missing, or others than it committed to"
                return replace(found, faults=tuple(faults), unexamined=why)
        inside, largest = self._inside(authentic, sealer)
        return replace(found, faults=(*faults, *inside), largest=largest)

    def _read(self, slip: wire.Envelope, message: memoryview) -> wire.Envelope:
        head, public = slip.head, self._ring.group.members[slip.head.sender].signing
        expected = wire.Expected(
            wire.Kind.UPDATE, head.form, head.packing, head.sender, head.round, head.attempt, head.epoch,
            head.fingerprint, head.grid, head.chunks, _id(slip), public,
        )  # fmt: skip
        envelope = wire.decode(message, expected)
        if (envelope.head, envelope.tag) != (head, slip.tag):
            raise ProtocolError(SERVER, "update", "another one than in the notice")
        return envelope

    def _outside(self, head: wire.Head) -> list[str]:
        """Failed checks that need no opening, except the tag's."""
        faults = [] if self._state.history.chain(head.round) == head.members[0].chain else ["chain"]
        return faults if head.grid in self._grids else [*faults, "grid"]

    def _inside(self, update: Authentic, sealer: Sealer) -> tuple[list[str], float]:
        """Failed checks of the opened content, and the largest value relative to the limit."""
        plan, members, silo = self._plan, update.head.members, update.head.sender
        grid, faults, factor = self._grids.get(update.head.grid, plan.grid(plan.first_exponents)), [], 0.0
        try:
            slots = sealer.open(update.first, members, sender=silo)
            header = tally.read(slots, 1, plan.cap, plan.header, silo)
            faults += ["evaluation"] if header.fault else []
            factor = plan.weighting.rate * header.mean_factor(plan.cap, normalised=plan.weighting.normalised)
        except ProtocolError as error:
            faults.append(error.check)
        most, beyond = grid.largest(open_portions(update.spans(), members, Serial(sealer), silo))
        faults += ["size"] if factor * max(grid.steps) * most > MOST else []
        faults += ["clipping"] if most > plan.packing.peak else []
        return faults + (["filling"] if beyond else []), most / plan.packing.peak

    def _unmasker(self, envelope: wire.Envelope, notice: Notice, consent: Consent) -> Unmasker:
        """Remove all masks of one update; `ProtocolError` if a seed is missing or differs from its commitment."""
        silo, member = envelope.head.sender, envelope.head.members[0]
        own = notice.seeds.get(silo, b"")
        seeds = Seeds(own, consent.pair_seeds(self._ring.own))
        return Unmasker(pack_opening({silo: envelope.head.annex}, {silo: seeds}), (member,))


def _id(update: wire.Envelope) -> str:
    return update.head.members[0].update_id


def _annexes(notice: Notice) -> dict[str, Annex]:
    return {one.head.sender: Annex.unpack(one.head.annex, one.head.sender, one.head.sender) for one in notice.updates}


def _at_odds(silo: str, annexes: Mapping[str, Annex]) -> Sequence[str]:
    """Silos that committed to another seed of the mask shared with ``silo``: either of the two lies."""
    own = annexes[silo].pairs
    return [name for name, one in annexes.items() if name != silo and one.pairs.get(silo) != own.get(name)]
