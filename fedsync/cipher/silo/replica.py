"""Silo's side of an encrypted run: keeps the model, and encrypts outgoing messages.

Every silo starts from the same model and adds the same sums, which only silos can open. So all silos have the same
model. The sums also determine the weights and the quantisation of the next updates.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain as chain_of
from pathlib import Path

import numpy as np

from fedsync.cipher.encoding import catch_up, tally
from fedsync.cipher.encoding import sealed_wire as wire
from fedsync.cipher.encoding.catch_up import CatchUp, Start
from fedsync.cipher.encoding.fields import annex_digest, clear_values
from fedsync.cipher.encoding.integrity import Authenticator
from fedsync.cipher.encoding.packing import Slots
from fedsync.cipher.encoding.quantization import QuantizationGrid, needed_exponents
from fedsync.cipher.encoding.tally import ROUNDS, Contribution, Question
from fedsync.cipher.keys.keyring import Ring
from fedsync.cipher.keys.material import Purpose
from fedsync.cipher.masking.mask_log import Masking
from fedsync.cipher.masking.mask_roster import MaskRoster
from fedsync.cipher.masking.masked_work import WorkDone
from fedsync.cipher.masking.masks import Masked
from fedsync.cipher.plan import EncryptionPlan
from fedsync.cipher.silo.catch_up_checks import CatchUpReader, check_alike
from fedsync.cipher.silo.figure_pool import KeptModel, countable
from fedsync.cipher.silo.history import History, run_digest
from fedsync.cipher.silo.opening import Opener
from fedsync.cipher.silo.replay_log import Asked, ChainLog
from fedsync.cipher.silo.replica_state import ReplicaState, Scales, open_snapshot, seal_snapshot
from fedsync.cipher.silo.sealing import Pipeline, Serial, seal_pieces
from fedsync.cipher.suites.suite import NO_DIGEST, NONCE_BYTES, Member, Sealer
from fedsync.common import foreign
from fedsync.common.errors import SERVER, ConfigError, PolicyError, ProtocolError
from fedsync.common.rng import Stream, generator
from fedsync.core.orders import Evaluation, PooledFigures, Subject, WorkOrder, WorkReport
from fedsync.model.chunked_arrays import ArrayKeeper, digest
from fedsync.model.layout import Vector, as_bytes
from fedsync.model.transfer import OtherVersion, Payload

logger = foreign.logger(__name__)

# Suffix of an update's name behind the silo's name: a number from 1 on, with one spelling each.
_SERIAL = "/[1-9][0-9]*"

_CLIPPED = 0.01  # share of an update that may be clipped before the silo's log reports it

ANY_MODEL = "any"  # replaces the digest of a first model for emulated silos, where the server may choose the model

SEALED = "sealed"

MAX_POOLED = 8  # newest pools reported to the server at once


class EncryptedReplica:
    """`fedsync.model.transfer.Replica` that keeps the model and seals updates.

    Args:
        plan: the silo's own plan, not the server's claim.
        examples: training samples that the silo holds.
        measure: makes an update like that of an order, float32 [layout.size]; returns it, steps, samples, precision.
        file: file of the state; updates are sealed in its folder. None keeps everything in memory.
        pipeline: seals and opens unmasked data; by default ``sealer`` in the current thread.
        specification: SHA-256 of the run's specification as the server sent it.
        first_model: hexadecimal SHA-256 of a first model that may replace the task's, or `ANY_MODEL`.
        origin: name under which the run began, if its name has changed: sealed data uses this name, masks the new name.
        seeded: noise on updates comes from the seeds of orders, which only virtual time may do.
    """

    def __init__(
        self,
        plan: EncryptionPlan,
        ring: Ring,
        sealer: Sealer,
        examples: int,
        initial: Callable[[], Vector],
        measure: Callable[[], tuple[Vector, int, int, int | None]],
        file: Path | None = None,
        run: str = "",
        pipeline: Pipeline | None = None,
        specification: bytes = NO_DIGEST,
        first_model: str | None = None,
        origin: str = "",
        *,
        seeded: bool = False,
    ) -> None:
        self._plan, self._ring, self._sealer, self._pipeline = plan, ring, sealer, pipeline or Serial(sealer)
        self._examples, self._initial, self._pinned, self._file = examples, initial, first_model, file
        self._measure, self._seeded = measure, seeded
        self._votes: tuple[int, ...] | None = None
        self._files = ArrayKeeper(None if file is None else file.parent / SEALED)
        group = ring.group
        # Versions may repeat under another name of the run, but masks must not.
        self._run, self._masked_run = (
            run_digest(name, specification, group.epoch, group.fingerprint) for name in (origin or run, run)
        )
        self._authenticator = Authenticator(ring.group.derive(Purpose.TAG), plan.form)
        self._chain_log = ChainLog(ring, self._run, run)
        self._reader = CatchUpReader(plan, ring, self._authenticator, self._run)
        self._opener = Opener(plan, ring, sealer, self._pipeline)
        self._state = self._kept() or ReplicaState(
            -1, np.empty(0, dtype=np.float32), Scales((plan.first_exponents,)), {}, History(self._run)
        )
        self._masking = Masking(ring, self._masked_run) if plan.masked else None
        self._roster: MaskRoster | None = None
        self._attempt = 0
        self._pooled: tuple[PooledFigures, ...] = ()
        self._asked = Asked.of_run(ring, self._run, file)

    def _kept(self) -> ReplicaState | None:
        if self._file is None:
            return None
        kept = ReplicaState.load(self._file, self._plan.layout.size, self._plan.header, self._plan.optimizer)
        if kept is not None and kept.history.run != self._run:
            logger.warning("%s is of another run or key epoch: this silo begins without a model", self._file)
            return None
        return kept

    @property
    def unrevealed(self) -> bool:
        return self._masking is not None and self._masking.unrevealed

    @property
    def holds(self) -> int:
        return self._state.version

    @property
    def model(self) -> Vector:
        return self._state.model

    @property
    def best(self) -> KeptModel | None:
        return self._state.best

    @property
    def best_model(self) -> Vector | None:
        return None if self.best is None else self.best.model

    @property
    def best_version(self) -> int:
        return -1 if self.best is None else self.best.version

    @property
    def control(self) -> Vector | None:
        optimizer = self._plan.optimizer
        return None if optimizer is None or not optimizer.controls else self._state.moments.vectors[0]

    def counted(self, silo: str) -> int:
        return self._state.counted.get(silo, 0)

    # Sending.

    def arriving(self, update: Vector, order: WorkOrder, report: WorkReport) -> Vector:
        """Update as silos find it in the seal: rounded and clipped, with the same random numbers as in `send`."""
        factor = self._factor(report.steps, report.samples, report.precision)
        sealed, clear = self._plan.divide(update)
        grid = self._plan.grid(self._state.scales.exponents[-1])
        return self._plan.unite(grid.rounded(sealed, factor, self._rounding(order)), clear)

    def _rounding(self, order: WorkOrder) -> np.random.Generator:
        return generator(order.seed, Stream.ROUNDING, self._ring.own.name)

    def greeting(self) -> Payload:
        # Measured once, because that may spend privacy; a silo that holds a model has voted before.
        if self._votes is None and self._plan.noise is None and self.holds < 0:
            update, steps, samples, precision = self._measure()
            self._votes = self._needed(self._divided(update, steps)[0], self._factor(steps, samples, precision))
        votes = self._plan.first_exponents if self._votes is None else self._votes
        member = Member(f"{self._ring.own.name}/0", 0, secrets.token_bytes(NONCE_BYTES), self._run)
        first = self._plan.grid(self._plan.first_exponents)
        header = tally.build(Contribution(1, votes), self._plan.cap, self._plan.header)
        slots = next(first.pack(header, np.zeros(0, np.int32)))  # a chunk without values
        annex = b"" if self._masking is None else self._masking.announcement
        head, signing = self._head(member, first, 1, annex=annex), self._ring.own.signing
        parts = seal_pieces(head, [slots], Serial(self._sealer), self._authenticator, signing)
        return np.frombuffer(b"".join(parts), dtype=np.uint8)

    def send(self, update: Vector, order: WorkOrder, report: WorkReport) -> Payload:
        """Seal an update, float32 [layout.size]; values that are not to be sealed follow in the clear. Raise
        `ConfigError` if the silo weighs more than the plan allows, or the log of used masks cannot be written. Raise
        `ProtocolError` for another silo's name, an unknown base version, or masks that were already used.
        """
        if not re.fullmatch(re.escape(self._ring.own.name) + _SERIAL, order.update_id):
            # Three updates of this silo must not pass for three silos': a sum's silos are counted by these names.
            raise ProtocolError(SERVER, "update id", f"{order.update_id[:80]!r} is no update of this silo")
        plan, weighting = self._plan, self._plan.weighting
        weight = weighting.weight(self._examples, report.samples, report.precision)
        factor = self._factor(report.steps, report.samples, report.precision)
        sealed, clear = self._divided(update, report.steps)
        # A vote of usual weight: with its own, a silo that outweighs all others would be outvoted, and always clipped.
        usual = self._state.scales.usual or weight
        votes = self._needed(sealed, factor / weight * usual) if plan.noise is None else plan.first_exponents
        progress = weighting.progress(report.steps)
        own = Contribution(weight, votes, progress, *self._figures(order, report))
        header = tally.build(own, plan.cap, plan.header)
        chain = self._state.history.chain(order.base_version)
        if chain is None:
            raise ProtocolError(SERVER, "order", f"it starts from version {order.base_version}, which it does not have")
        member = Member(order.update_id, order.base_version, secrets.token_bytes(NONCE_BYTES), chain)
        grid = plan.grid(self._state.scales.exponents[-1])
        pipeline, annex = self._pipeline, b""
        if self._masking is not None and self._roster is not None:
            counts = report.samples if weighting.by == "samples" else 1
            work = WorkDone.of(order, report, counts * report.steps)
            masks = self._masking.begin(order, chain, self._attempt, self._roster, work, plan.work_ratio)
            pipeline, annex = Serial(Masked(self._sealer, masks.mask)), masks.annex
        clipped = 0

        def portions() -> Iterator[Slots]:
            nonlocal clipped
            if plan.noise is not None:
                drawn = generator(order.seed, Stream.SILO_NOISE, member.silo) if self._seeded else None
                noisy = plan.noise.integers(sealed, factor, plan.bits, self._rounding(order), drawn)
                yield from grid.pack(header, noisy)
                return
            for slots, beyond in grid.encode(header, sealed, factor, self._rounding(order)):
                clipped += beyond
                yield slots

        head = self._head(member, grid, plan.chunks, self._attempt, annex)
        sealed_parts = seal_pieces(head, portions(), pipeline, self._authenticator, self._ring.own.signing)
        beside = as_bytes(clear)
        message = self._files.write(head.nbytes + beside.nbytes, chain_of(sealed_parts, (beside.data,)))
        if clipped > _CLIPPED * len(sealed):
            told = "%s: %d of %d values were larger than agreed: clipped. If it goes on, write aggregation.weight: silo"
            logger.warning(told, order.update_id, clipped, len(sealed))
        return message

    def _figures(self, order: WorkOrder, report: WorkReport) -> tuple[Evaluation | None, float | None, Question]:
        if not self._plan.seal_metrics:
            return None, None, ROUNDS
        if not order.evaluate:
            return None, report.loss, ROUNDS
        if order.subject is Subject.BEST and self.best is not None:
            model = self.best.digest
        else:
            model = order.update_id if order.subject.own else digest(self._state.model).hex()
        if not self._asked.admits(order, model):
            return None, report.loss, ROUNDS
        found = countable(self._ring.own.name, report.evaluation, self._plan.statistics)
        return found, report.loss, (order.subject, order.split)

    @property
    def owed(self) -> None: ...

    def owe(self, owed: Vector | None) -> None: ...

    @property
    def pooled(self) -> tuple[PooledFigures, ...] | None:
        """Pools that silos published in the last received commits, where figures are sealed."""
        return self._pooled if self._plan.seal_metrics else None

    def disclosed(self, report: WorkReport) -> WorkReport:
        if not self._plan.seal_metrics:
            return report
        # Seconds of an evaluation, times the speed, would disclose its number of samples.
        kept = replace(report, loss=None, evaluation=None, metrics={}, overhead_s={}, pooled=self._pooled)
        return replace(kept, windows=tuple(window.coarse() for window in report.windows))

    def answer(self, question: Payload) -> Payload:
        if self._masking is None:
            raise ProtocolError(SERVER, "question", "asked about masks in a run without masks")
        return self._masking.answer(question)

    def snapshot(self) -> Payload:
        return np.frombuffer(seal_snapshot(self._ring, self._plan, self._state), dtype=np.uint8)

    def _factor(self, steps: int, samples: int, precision: int | None = None) -> float:
        """Multiplier of an update before rounding: n_i / (cap |a_i|)."""
        plan = self._plan
        weight = plan.weighting.weight(self._examples, samples, precision)
        if weight > plan.cap:
            problem = f"{weight} samples, at most {plan.cap} can be sealed"
            raise ConfigError("aggregation.weight", problem, "Weigh by silo")
        return weight / plan.cap / plan.weighting.progress(steps)

    def _divided(self, update: Vector, steps: int) -> tuple[Vector, Vector]:
        """Parts of an update for the seal and in the clear; for running statistics, undoes `_factor`'s division."""
        sealed, clear = self._plan.divide(update)
        if self._plan.weighting.normalised and self._plan.averages:
            sealed = sealed.copy()
            for start, stop in self._plan.averages:
                sealed[start:stop] *= np.float32(self._plan.weighting.progress(steps))
        return sealed, clear

    def _needed(self, sealed: Vector, factor: float) -> tuple[int, ...]:
        return needed_exponents(sealed, self._plan.sealed, factor, self._plan.bits)

    def _head(
        self, member: Member, grid: QuantizationGrid, chunks: int, attempt: int = 0, annex: bytes = b""
    ) -> wire.Head:
        plan, group = self._plan, self._ring.group
        if annex:
            member = replace(member, annex=annex_digest(annex))
        return wire.Head(
            wire.Kind.UPDATE, plan.form, plan.packing, self._ring.own.name, member.round, attempt, group.epoch,
            group.fingerprint, group.conceal(grid.digest), chunks, (member,), annex,
        )  # fmt: skip

    # Receiving.

    def receive(self, payload: Payload, version: int) -> Vector:
        """Apply a catch-up to the model; nothing changes unless everything is valid and on disk.

        Raises:
            ConfigError: the state or the chain log cannot be written.
            OtherVersion: the catch-up continues another version.
            ProtocolError: silos did not seal all of it, or it contradicts what this silo followed before.
        """
        received = catch_up.decode(payload)
        if received.version != version or version < 0:
            raise ProtocolError(SERVER, "version", f"the catch-up leads to version {received.version}, not {version}")
        roster = None if self._masking is None else self._read_roster(received, self._masking)
        followed = self._chain_log.followed
        if self._state.version != version:  # else a repeated order: its content was applied already
            state, pooled = self._follow(received, {**self._state.history.known(), **followed})
            self._chain_log.enter(state.history.known())
            if self._file is not None:
                state = state.save(self._file)
            self._state, self._pooled = state, pooled[-MAX_POOLED:]
            if self._masking is not None:
                self._masking.settle(version)
        self._attempt, self._roster = received.attempt, roster
        return self._state.model

    def _read_roster(self, received: CatchUp, masking: Masking) -> MaskRoster:
        plan, members, own = self._plan, self._ring.group.members, masking.pair
        roster = MaskRoster.read(bytes(received.roster), members, self._masked_run, plan.colluding, plan.members)
        if roster.keys.get(own.name) != own.public:
            raise OtherVersion(self._state.version, received.base, masking.announcement)
        return roster

    def _follow(self, received: CatchUp, followed: dict[int, bytes]) -> tuple[ReplicaState, tuple[PooledFigures, ...]]:
        base, author = self._base(received)
        newest = max(followed, default=-1)
        if received.version < newest:
            detail = f"it leads to version {received.version}, but this silo was already at {newest}"
            raise ProtocolError(SERVER, "version", detail)
        calibration, links = self._reader.read(received, base, author)
        # Everything was verified as sealed by silos: now it may be opened.
        state = base
        if state is None:
            if calibration is None:
                raise PolicyError("a catch-up from the beginning was read without its calibration")
            state = self._opener.begin(calibration, self._first_model(received), self._run)
        known = state.history.known()
        check_alike(known, followed)
        pooled: list[PooledFigures] = []
        for link in links:
            state, figures = self._opener.follow(state, link)
            known[state.version] = state.history.chains[-1]
            check_alike({state.version: known[state.version]}, followed)
            pooled += [] if figures is None else [figures]
        self._reader.check_claims(links, known, base, author)
        return state, tuple(pooled)

    def _base(self, received: CatchUp) -> tuple[ReplicaState | None, str | None]:
        """State that the catch-up continues (None at the beginning), and the author if it is a snapshot's.

        A snapshot or the beginning replaces the present state, because the server may have nothing that continues it.
        But the catch-up must lead to the present state, and on.
        """
        held = self._state.version
        if received.start is not Start.SNAPSHOT and received.base >= 0:
            if held != received.base:
                raise OtherVersion(held, received.base)
            return self._state, None
        if held >= 0:
            logger.warning("the server has no catch-up from version %d: it builds the model again", held)
        if received.start is not Start.SNAPSHOT:
            return None, None
        author, state = open_snapshot(self._ring, self._plan, self._run, bytes(received.model), received.base)
        return state, author

    def _first_model(self, received: CatchUp) -> Vector:
        if received.start is Start.HELD:
            return self._initial()
        model = clear_values(received.model, self._plan.layout.size, SERVER)
        found = hashlib.sha256(as_bytes(model).data).hexdigest()
        if self._pinned not in (ANY_MODEL, found):
            detail = f"SHA-256 {found}, which the owner of this silo has not pinned (first_model)"
            raise ProtocolError(SERVER, "first model", detail)
        return model
