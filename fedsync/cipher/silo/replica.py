"""The silo's side under encryption: it keeps the model, and seals what it sends.

Every silo starts from the same model and adds the same sums, which only silos can open, so all have the same model.
What a sum weighs and on which grid the next updates are sealed is in the sums, too.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedsync.cipher.encoding import catch_up, tally, wire
from fedsync.cipher.encoding.catch_up import CatchUp, LinkEntry, LinkKind, Start
from fedsync.cipher.encoding.integrity import Authenticator
from fedsync.cipher.encoding.packing import Slots
from fedsync.cipher.encoding.quantization import QuantizationGrid, needed_exponents
from fedsync.cipher.encoding.tally import Contribution, Tally
from fedsync.cipher.keys.keyring import Ring
from fedsync.cipher.keys.material import Purpose, open_blob, seal_blob
from fedsync.cipher.masking.mask_log import Masking
from fedsync.cipher.masking.masks import Masked, Unmasker
from fedsync.cipher.masking.unmask import decode_reveals
from fedsync.cipher.plan import EncryptionPlan
from fedsync.cipher.silo.replica_state import SEEN, ReplicaState, Scales
from fedsync.cipher.silo.sealing import Pipeline, Serial, open_portions, seal_message
from fedsync.cipher.suites.suite import NO_DIGEST, NONCE_BYTES, Member, Sealer
from fedsync.core.errors import SERVER, ConfigError, ProtocolError
from fedsync.core.layout import Vector
from fedsync.core.orders import Evaluation, WorkOrder, WorkReport
from fedsync.core.rng import Stream, generator
from fedsync.core.transfer import OtherVersion, Payload

logger = logging.getLogger(__name__)

_CLIPPED = 0.01
"""Share of an update that may be clipped before the silo's log says so."""

_SERVER = SERVER
_CALIBRATION = "/0"


class EncryptedReplica:
    """A `fedsync.core.transfer.Replica` that keeps the model and seals updates.

    Args:
        plan: how updates are sealed; the silo's own, not the server's say.
        ring: the silo's keys.
        sealer: of the plan's suite, with the group's secret.
        examples: training samples that the silo holds.
        initial: makes the model before any training.
        measure: makes an update such as an order of this silo may come to, float32 [layout.size], and says how many
            local steps and samples are behind it.
        file: where the state is kept, or None to keep it in memory.
        run: name of the run; masks are of one run only.
        pipeline: seals and opens what is not masked; by default ``sealer`` in this thread.
    """

    def __init__(
        self,
        plan: EncryptionPlan,
        ring: Ring,
        sealer: Sealer,
        examples: int,
        initial: Callable[[], Vector],
        measure: Callable[[], tuple[Vector, int, int]],
        file: Path | None = None,
        run: str = "",
        pipeline: Pipeline | None = None,
    ) -> None:
        self._plan = plan
        self._ring = ring
        self._sealer = sealer
        self._pipeline = pipeline or Serial(sealer)
        self._examples = examples
        self._initial = initial
        self._measure = measure
        self._file = file
        kept = None if file is None else ReplicaState.load(file, plan.layout.size, len(plan.sealed.names))
        self._state = kept or ReplicaState(-1, np.empty(0, dtype=np.float32), Scales((plan.first_exponents,)), {})
        self._masking = Masking(ring, run)
        self._authenticator = Authenticator(ring.group.derive(Purpose.TAG), plan.form)
        self._attempt = 0
        self._pooled = Evaluation(0.0, 0.0, 0)

    @property
    def unrevealed(self) -> bool:
        return self._masking.unrevealed  # masks are kept in memory only

    @property
    def holds(self) -> int:
        return self._state.version

    @property
    def model(self) -> Vector:
        return self._state.model

    # What is sent.

    def greeting(self) -> Payload:
        """How large this silo's updates are, sealed: one header chunk."""
        update, steps, samples = self._measure()
        votes = self._needed(self._plan.divide(update)[0], self._factor(steps, samples))
        member = Member(f"{self._ring.own.name}{_CALIBRATION}", 0, secrets.token_bytes(NONCE_BYTES), NO_DIGEST)
        first = self._plan.grid(self._plan.first_exponents)
        slots = first.header_only(tally.build(Contribution(1, votes), self._plan.cap))
        head, signing = self._head(member, first, 1), self._ring.own.signing
        return _bytes(seal_message(head, [slots], Serial(self._sealer), self._authenticator, signing))

    def send(self, update: Vector, order: WorkOrder, report: WorkReport) -> Payload:
        """An update, float32 [layout.size], sealed; values that are not to be sealed follow in the clear.

        Raises:
            ConfigError: the silo weighs more than the plan allows, or it cannot be put on disk which masks it used.
            ProtocolError: an update was sealed under the masks of this attempt before.
        """
        plan, weighting = self._plan, self._plan.weighting
        weight, progress = weighting.weight(self._examples, report.samples), weighting.progress(report.steps)
        factor = self._factor(report.steps, report.samples)
        sealed, clear = plan.divide(update)
        votes = self._needed(sealed, factor)
        evaluation = report.evaluation if plan.seal_metrics else None
        own = tally.build(Contribution(weight, votes, progress, evaluation), plan.cap)
        member = Member(order.update_id, order.base_version, secrets.token_bytes(NONCE_BYTES), NO_DIGEST)
        grid = plan.grid(self._state.scales.exponents[-1])
        pipeline = self._pipeline
        if plan.masked:
            masks = self._masking.begin(order.base_version, self._attempt)
            pipeline = Serial(Masked(self._sealer, masks))
        clipped = 0

        def portions() -> Iterator[Slots]:
            nonlocal clipped
            rng = generator(order.seed, Stream.ROUNDING, self._ring.own.name)
            for slots, beyond in grid.encode(own, sealed, factor, rng):
                clipped += beyond
                yield slots

        head = self._head(member, grid, plan.chunks, self._attempt)
        message = seal_message(head, portions(), pipeline, self._authenticator, self._ring.own.signing)
        if clipped > _CLIPPED * len(sealed):
            logger.warning(
                "%s: %d of %d values were larger than agreed: clipped", order.update_id, clipped, len(sealed)
            )
        if len(clear):
            message += clear.astype("<f4", copy=False).tobytes()
        return np.frombuffer(message, dtype=np.uint8)

    def reported(self, evaluation: Evaluation) -> Evaluation:
        """This silo's own, or, where metrics are sealed, what all silos of the last commit found together.

        That is of the version before the one that was evaluated: sums take a commit to come back.
        """
        return self._pooled if self._plan.seal_metrics else evaluation

    def disclosed(self, report: WorkReport) -> WorkReport:
        """Where metrics are sealed, open figures stay here: the header adds up evaluations and nothing else."""
        if not self._plan.seal_metrics:
            return report
        return replace(report, metrics={}, evaluation=None if report.evaluation is None else self._pooled)

    def answer(self, question: Payload) -> Payload:
        return self._masking.answer(question)

    def snapshot(self) -> Payload:
        """The model that is here, sealed for other silos: AES-GCM under a key of the group."""
        return _bytes(seal_blob(self._ring.group, Purpose.SNAPSHOT, self._about, self._state.to_bytes()))

    @property
    def _about(self) -> bytes:
        """What a snapshot is bound to: the model's layout and how it is sealed."""
        return self._plan.grid(self._plan.first_exponents).digest

    def _factor(self, steps: int, samples: int) -> float:
        """What an update is multiplied by before it is rounded: n_i / (cap |a_i|)."""
        plan = self._plan
        weight = plan.weighting.weight(self._examples, samples)
        if weight > plan.cap:
            raise ConfigError(
                "aggregation.weight", f"{weight} samples, at most {plan.cap} can be sealed", "Weigh by silo"
            )
        return weight / plan.cap / plan.weighting.progress(steps)

    def _needed(self, sealed: Vector, factor: float) -> tuple[int, ...]:
        return needed_exponents(sealed, self._plan.sealed, factor, self._plan.bits)

    def _head(self, member: Member, grid: QuantizationGrid, chunks: int, attempt: int = 0) -> wire.Head:
        plan, group = self._plan, self._ring.group
        return wire.Head(
            wire.Kind.UPDATE, plan.form, plan.packing, self._ring.own.name, member.round, attempt, group.epoch,
            group.fingerprint, grid.digest, chunks, (member,),
        )  # fmt: skip

    # What is received.

    def receive(self, payload: Payload, version: int) -> Vector:
        """Add what came to the model that is here; nothing changes unless all of it is in order and on disk.

        Raises:
            ConfigError: the disk does not take it.
            OtherVersion: it continues another version.
            ProtocolError: it is not what silos sealed, or not all of it.
        """
        received = catch_up.decode(payload)
        if received.version != version or version < 0:
            raise ProtocolError(_SERVER, "version", f"the catch-up leads to version {received.version}, not {version}")
        self._attempt = received.attempt
        if self._state.version == version:
            return self._state.model  # a repeated order: what it brings is here already
        state = self._begin(received)
        pooled = None
        for link in received.links:
            sign = -1 if link.kind is LinkKind.UNDO else 1
            for entry in link.entries:
                state, added_up = self._add(state, entry, sign)
                pooled = added_up.evaluation if sign > 0 else None
        state = replace(state, version=version)
        if self._file is not None:
            state.save(self._file)
        self._state, self._pooled = state, pooled or self._pooled
        return self._state.model

    def _begin(self, received: CatchUp) -> ReplicaState:
        """The state that the catch-up continues.

        A snapshot or the beginning replaces whatever is here: the server may have nothing that leads on from it.
        """
        held = self._state.version
        if received.start is Start.SNAPSHOT or received.base < 0:
            if held >= 0:
                logger.warning("the server has nothing that continues version %d: the model is made anew", held)
            return self._open_snapshot(received) if received.start is Start.SNAPSHOT else self._open_beginning(received)
        if held != received.base:
            raise OtherVersion(held, received.base)
        return self._state

    def _open_beginning(self, received: CatchUp) -> ReplicaState:
        model = self._initial() if received.start is Start.HELD else self._clear(received.model, self._plan.layout.size)
        return ReplicaState(0, model, Scales((self._open_calibration(received),)), {})

    def _open_calibration(self, received: CatchUp) -> tuple[int, ...]:
        """The exponents that silos begin with."""
        first = self._plan.grid(self._plan.first_exponents)
        envelope = self._decode(received.calibration, 0, 1)
        if envelope.head.grid != first.digest:
            raise ProtocolError(_SERVER, "calibration", "made for another model, or another number of bits")
        for member in envelope.head.members:
            self._check_member(member, {}, calibration=True)
        self._authenticator.authenticate(envelope, _SERVER)
        added_up = self._tally(self._sealer.open(envelope.words, envelope.head.members), envelope)
        spared = tally.votes_spared(Counter(member.silo for member in envelope.head.members), self._plan.colluding)
        return tally.next_exponents(added_up, self._plan.first_exponents, spared, self._plan.headroom)

    def _open_snapshot(self, received: CatchUp) -> ReplicaState:
        data = open_blob(self._ring.group, Purpose.SNAPSHOT, self._about, bytes(received.model), _SERVER)
        try:
            state = ReplicaState.from_bytes(data, self._plan.layout.size, len(self._plan.sealed.names))
        except ValueError as error:
            raise ProtocolError(_SERVER, "snapshot", str(error)) from error
        if state.version != received.base:
            raise ProtocolError(_SERVER, "snapshot", f"of version {state.version}, announced as {received.base}")
        return state

    def _add(self, state: ReplicaState, entry: LinkEntry, sign: int) -> tuple[ReplicaState, Tally]:
        """Open one entry's sums and add their weighted mean, or take it back; returns what was in their headers too."""
        plan = self._plan
        grids = self._known_grids(state.scales)
        unmasker = None
        if plan.masked:
            unmasker = Unmasker(list(self._ring.group.members), decode_reveals(bytes(entry.reveals)))
        sealer: Sealer = self._sealer if unmasker is None else Masked(self._sealer, unmasker=unmasker)
        pipeline = self._pipeline if unmasker is None else Serial(sealer)
        envelopes: list[wire.Envelope] = []
        added, tallies = dict(state.added), []
        for one in entry.sums:
            envelope = self._decode(one, entry.version, plan.chunks)
            if envelope.head.grid not in grids:
                raise ProtocolError(_SERVER, "grid", "updates were sealed on a grid that silos did not agree on")
            if sign > 0:
                for member in envelope.head.members:
                    self._check_member(member, added)
            self._authenticator.authenticate(envelope, _SERVER)
            envelopes.append(envelope)
        # All sums are what silos sealed: now they may be opened.
        for envelope in envelopes:
            first = sealer.open(envelope.words[:1], envelope.head.members)
            tallies.append(self._tally(first, envelope))
        added_up = tally.together(tallies)
        factor = sign * plan.weighting.rate * added_up.mean_factor(plan.cap, normalised=plan.weighting.normalised)
        change = np.zeros(plan.sealed.size, dtype=np.float32)
        part = np.empty_like(change)
        for envelope in envelopes:
            grid = grids[envelope.head.grid]
            grid.decode(open_portions(envelope.words, envelope.head.members, pipeline, _SERVER), factor, part)
            change += part
        clear = self._clear(entry.clear, plan.clear_values) * np.float32(sign)
        voters = [member.silo for envelope in envelopes for member in envelope.head.members]
        scales = state.scales.after(added_up, voters, plan) if sign > 0 else state.scales
        return ReplicaState(state.version, state.model + plan.unite(change, clear), scales, added), added_up

    def _tally(self, slots: Slots, envelope: wire.Envelope) -> Tally:
        members, tensors = len(envelope.head.members), len(self._plan.sealed.names)
        return tally.read(slots, members, self._plan.cap, tensors, _SERVER)

    def _known_grids(self, scales: Scales) -> dict[bytes, QuantizationGrid]:
        grids = [self._plan.grid(exponents) for exponents in scales.exponents]
        return {grid.digest: grid for grid in grids}

    def _decode(self, data: catch_up.Piece, version: int, chunks: int) -> wire.Envelope:
        plan, group = self._plan, self._ring.group
        expected = wire.Expected(
            wire.Kind.AGGREGATE,
            plan.form,
            plan.packing,
            _SERVER,
            version,
            None,
            group.epoch,
            group.fingerprint,
            None,
            chunks,
        )
        return wire.decode(data, expected)

    def _check_member(self, member: Member, added: dict[str, tuple[int, ...]], *, calibration: bool = False) -> None:
        """An update of a silo that has a key, which was not added before."""
        name, _, serial = member.update_id.rpartition("/")
        if name not in self._ring.group.members or not serial.isdecimal():
            raise ProtocolError(_SERVER, "members", f"{member.update_id[:80]!r} is of no silo that has a key")
        number = int(serial)
        if calibration:
            if number != 0:
                raise ProtocolError(_SERVER, "members", f"{member.update_id[:80]!r} is no calibration")
            return
        seen = added.get(name, ())
        if number in seen or (len(seen) == SEEN and number < seen[0]) or number < 1:
            raise ProtocolError(_SERVER, "members", f"{member.update_id[:80]!r} was added before")
        added[name] = tuple(sorted((*seen, number)))[-SEEN:]

    def _clear(self, data: catch_up.Piece, size: int) -> Vector:
        if len(data) != 4 * size:
            raise ProtocolError(_SERVER, "length", f"{len(data)} bytes in the clear, not {4 * size}")
        values = np.frombuffer(data, dtype="<f4").astype(np.float32)
        if not np.isfinite(values).all():
            raise ProtocolError(_SERVER, "finite", "values in the clear are not finite")
        return values


def _bytes(data: bytes | bytearray) -> Payload:
    return np.frombuffer(data, dtype=np.uint8)
