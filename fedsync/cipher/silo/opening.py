"""Opens sums that were authenticated, and does to the model what their links say.

What comes out is a pure function of the sums, in order, so that all silos have the same model to the last bit: each
link is added by itself, in the order of versions and of its sums, with float32 operations that round alike everywhere.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from fedsync.cipher.encoding import tally, wire
from fedsync.cipher.encoding.catch_up import LinkKind
from fedsync.cipher.encoding.packing import Slots
from fedsync.cipher.encoding.quantization import QuantizationGrid
from fedsync.cipher.encoding.tally import Tally
from fedsync.cipher.keys.keyring import Ring
from fedsync.cipher.masking.masks import Masked, Unmasker
from fedsync.cipher.plan import EncryptionPlan
from fedsync.cipher.silo.history import History, added_content
from fedsync.cipher.silo.reading import ReadEntry, ReadLink, admit
from fedsync.cipher.silo.replica_state import ReplicaState, Scales
from fedsync.cipher.silo.sealing import Pipeline, Serial, open_portions
from fedsync.cipher.suites.suite import Sealer
from fedsync.core.errors import SERVER, ProtocolError, SpoiledSum
from fedsync.core.layout import Vector
from fedsync.core.orders import PooledFigures

logger = logging.getLogger(__name__)


@contextmanager
def _sealed_by_silos() -> Iterator[None]:
    """What fails within was authentic: it is the doing of a silo that has the key, not of the server."""
    try:
        yield
    except ProtocolError as error:
        raise SpoiledSum(error.sender, error.check, error.detail) from error


class Opener:
    """Opens what `fedsync.cipher.silo.reading.CatchUpReader` has read; it changes nothing but the states it returns.

    Args:
        plan: how updates are sealed.
        ring: the silo's keys.
        sealer: of the plan's suite, with the group's secret.
        pipeline: opens what is not masked.
    """

    def __init__(self, plan: EncryptionPlan, ring: Ring, sealer: Sealer, pipeline: Pipeline) -> None:
        self._plan = plan
        self._ring = ring
        self._sealer = sealer
        self._pipeline = pipeline

    def begin(self, calibration: wire.Envelope, model: Vector, run: bytes) -> ReplicaState:
        """Version 0.

        Args:
            calibration: what silos said of the size of their updates.
            model: before any training.
            run: R.

        Raises:
            SpoiledSum: a silo sealed something else than a calibration.
        """
        plan, members = self._plan, calibration.head.members
        with _sealed_by_silos():
            slots = self._sealer.open(calibration.words, members)
            added_up = self._tally(slots, calibration)
            if slots.reshape(-1)[plan.grid(plan.first_exponents).head :].any():
                raise ProtocolError(SERVER, "filling", "there are values in a calibration")
        spared = tally.votes_spared(Counter(member.silo for member in members), plan.colluding)
        first = tally.next_exponents(added_up, plan.first_exponents, spared, plan.headroom)
        state = ReplicaState(0, model, Scales((first,)), {}, History(run))
        concealed = self._ring.group.conceal(state.digest)
        return replace(state, history=state.history.begin(added_content([calibration], b""), concealed))

    def follow(self, state: ReplicaState, link: ReadLink) -> tuple[ReplicaState, PooledFigures | None]:
        """The state one version later, and figures of enough silos, if there are with what was added.

        Raises:
            SpoiledSum: a silo sealed something that no silo may.
        """
        figures = None
        with _sealed_by_silos():
            match link.kind:
                case LinkKind.ADD:
                    state, figures = self._add(state, link.entries[0])
                case LinkKind.UNDO:
                    for entry in link.entries:
                        change, _ = self._change(state, entry, self._openable(state, entry), -1)
                        state = replace(state, model=state.model + change)
                case LinkKind.EMPTY:
                    pass
        state = replace(state, version=state.version + 1)
        concealed = self._ring.group.conceal(state.digest)
        return replace(state, history=state.history.after(link.kind, link.contents, concealed)), figures

    def _add(self, state: ReplicaState, entry: ReadEntry) -> tuple[ReplicaState, PooledFigures | None]:
        added = dict(state.added)
        for member in entry.members:
            admit(member, added, self._ring)
        openable = self._openable(state, entry)
        voters = [member.silo for one in openable for member in one.head.members]
        if len(voters) < len(entry.members):
            others = ", ".join(sorted({member.silo for member in entry.members} - set(voters)))
            logger.warning("version %d: %s sealed on a grid that nobody agreed on", entry.version, others)
        change, added_up = self._change(state, entry, openable, 1)
        scales = state.scales.after(len(entry.members), added_up, voters, self._plan)
        pool, figures = state.pool, None
        if added_up is not None:
            members = [member for one in openable for member in one.head.members]
            pool, figures = pool.after(entry.version, added_up, members, self._plan.quorum)
        return replace(state, model=state.model + change, scales=scales, added=added, pool=pool), figures

    def _change(
        self, state: ReplicaState, entry: ReadEntry, openable: Sequence[wire.Envelope], sign: int
    ) -> tuple[Vector, Tally | None]:
        """What an entry changes the model by, float32 [values], and what was in its headers."""
        plan, weighting = self._plan, self._plan.weighting
        change = np.zeros(plan.sealed.size, dtype=np.float32)
        clear = entry.clear * np.float32(sign)
        if not openable:
            return plan.unite(change, clear), None
        grids = self._grids(state)
        sealer, pipeline = self._unmasked(entry.unmasker)
        tallies = [self._tally(sealer.open(one.words[:1], one.head.members), one) for one in openable]
        added_up = tally.together(tallies)
        factor = sign * weighting.rate * added_up.mean_factor(plan.cap, normalised=weighting.normalised)
        part = np.empty_like(change)
        for one in openable:
            members = one.head.members
            slots = open_portions(one.words, members, pipeline, SERVER)
            grids[one.head.grid].decode(slots, factor, part, len(members), SERVER)
            change += part
        return plan.unite(change, clear), added_up

    def _openable(self, state: ReplicaState, entry: ReadEntry) -> Sequence[wire.Envelope]:
        """Sums on grids that silos agreed on, if they are of enough silos.

        A silo that seals on a grid of its own cannot be kept out by the server, which knows no grids. Its update brings
        nothing, at no silo; to refuse the version would let one silo end the run.
        """
        grids = self._grids(state)
        openable = [one for one in entry.sums if one.head.grid in grids]
        silos = {member.silo for one in openable for member in one.head.members}
        return openable if len(silos) >= self._plan.members else ()

    def _grids(self, state: ReplicaState) -> dict[bytes, QuantizationGrid]:
        grids = [self._plan.grid(exponents) for exponents in state.scales.exponents]
        return {self._ring.group.conceal(grid.digest): grid for grid in grids}

    def _unmasked(self, unmasker: Unmasker | None) -> tuple[Sealer, Pipeline]:
        """What opens one entry's sums."""
        if unmasker is None:
            return self._sealer, self._pipeline
        sealer = Masked(self._sealer, unmasker=unmasker)
        return sealer, Serial(sealer)

    def _tally(self, slots: Slots, envelope: wire.Envelope) -> Tally:
        members, tensors = len(envelope.head.members), len(self._plan.sealed.names)
        return tally.read(slots, members, self._plan.cap, tensors, SERVER)
