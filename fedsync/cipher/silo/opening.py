"""Opens sums that were authenticated, and does to the model what their links say.

What comes out is a pure function of the sums, in order, so that all silos have the same model to the last bit: each
link is added by itself, in the order of versions and of its sums, with float32 operations that round alike everywhere.

Authentic is what some silo sealed, and a silo may lie. A sum is *spoiled* if what is in it no silo may seal:

| what | noticed by |
|---|---|
| the past of another run or fork | its members' D, before it is opened |
| a grid that nobody agreed on | its grid, before it is opened |
| an older version than the newest, where silos keep control variates: the server's doing | the same |
| a header that is no sum of headers | `tally.read` |
| masks of other seeds than were committed to | the same, for what opens then is random |
| values beyond the clipping range, or behind the last of the model | `QuantizationGrid.decode` |
| a change of the model beyond `MOST`, by a header that claims so | its values |

A spoiled sum brings nothing, at no silo, and the run goes on. That is decided by what is authenticated and by the
silo's own state, which all silos of one D share; it is remembered which sums were added (S of
`fedsync.cipher.silo.history`), so that no more is taken back later. Nothing of it is told to anybody: who spoils sums
costs the run their updates, and the silo's log names these.

Where the run has an optimizer, the model moves by what it makes of a link's change; see
`fedsync.model.server_optimizer`. Its moments are in the state, and so in what silos attest. Links that take back are
refused then: no silo knows what the moments were.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from fedsync.cipher.encoding import tally
from fedsync.cipher.encoding.catch_up import LinkKind
from fedsync.cipher.encoding.integrity import Authentic
from fedsync.cipher.encoding.packing import Slots
from fedsync.cipher.encoding.quantization import QuantizationGrid, needed_exponents
from fedsync.cipher.encoding.tally import ROUNDS, Tally
from fedsync.cipher.keys.keyring import Ring
from fedsync.cipher.masking.masks import Masked, Unmasker
from fedsync.cipher.plan import EncryptionPlan
from fedsync.cipher.silo.figure_pool import FigurePool, answer
from fedsync.cipher.silo.history import History, added_content
from fedsync.cipher.silo.kept_model import KeptModel, surpasses
from fedsync.cipher.silo.reading import ReadEntry, ReadLink, admit, members_of
from fedsync.cipher.silo.replica_state import CALIBRATED, ReplicaState, Scales
from fedsync.cipher.silo.sealing import Pipeline, Serial, open_portions
from fedsync.cipher.suites.suite import Member, Sealer
from fedsync.common import foreign
from fedsync.common.errors import SERVER, ProtocolError
from fedsync.core.orders import PooledFigures, Subject
from fedsync.model.array_keeper import ArrayKeeper
from fedsync.model.chunked_arrays import give_back, spans
from fedsync.model.control_downlink import serial_of
from fedsync.model.layout import Vector
from fedsync.model.server_optimizer import Backing, ServerOptimizer

logger = foreign.logger(__name__)


_MEMORY = ArrayKeeper()

MOST = 2.0**64
"""No value of a model changes by more in one version: so many versions bring no infinity."""


@dataclass(frozen=True, slots=True, eq=False)
class _Opened:
    """What one entry brings.

    Args:
        change: of the model, float32 [values], which nobody else has.
        tally: of its headers; None if no sum counts.
        counted: sums that count.
        shown: exponents of the tensors that its largest values need, as of a single update; empty if no sum counts.
        spoiled: silos in sums of which one sealed what no silo may; of what a server can bring about none is here.
    """

    change: Vector
    tally: Tally | None = None
    counted: tuple[int, ...] = ()
    shown: tuple[int, ...] = ()
    mean: float = 0.0
    spoiled: tuple[str, ...] = ()


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

    def begin(self, calibration: Authentic, model: Vector, run: bytes) -> ReplicaState:
        """Version 0. Of a calibration that is spoiled silos learn nothing, and agree after their first updates.

        Args:
            calibration: what silos said of the size of their updates.
            model: before any training.
            run: R.
        """
        plan, members = self._plan, calibration.head.members
        first = plan.first_exponents
        try:
            if any(member.chain != run for member in members):
                raise _spoiled("chain", "a silo means another run")
            slots = self._sealer.open(calibration.first, members)
            added_up = self._tally(slots, calibration)
            if slots.reshape(-1)[plan.grid(first).head :].any():
                raise _spoiled("filling", "there are values in a calibration")
            spared = tally.votes_spared(Counter(member.silo for member in members), plan.colluding)
            # There are no values yet that would bear out much.
            first = tuple(
                map(
                    min,
                    (one + CALIBRATED for one in first),
                    tally.next_exponents(added_up, first, spared, plan.headroom),
                )
            )
        except ProtocolError as error:
            _log_spoiled(0, members, error)
        state = ReplicaState(0, model, Scales((first,)), {}, History(run))
        if plan.optimizer is not None:
            state = replace(state, moments=plan.optimizer.begin(model.size, _MEMORY))
        concealed = self._ring.group.conceal(state.digest)
        return replace(state, history=state.history.begin(added_content([calibration.head], b""), concealed))

    def follow(self, state: ReplicaState, link: ReadLink) -> tuple[ReplicaState, PooledFigures | None]:
        """The state one version later, and figures of enough silos, if there are with what was added."""
        figures, counted = None, 0
        match link.kind:
            case LinkKind.ADD:
                (entry,) = link.entries
                opened = self._judged(state, entry)
                state, figures = self._add(state, entry, opened)
                counted = sum(1 << index for index in opened.counted)
            case LinkKind.UNDO:
                for entry in link.entries:
                    opened = self._change(state, entry, self._added(state, entry), {})
                    state = replace(state, model=_moved(state.model, opened.change, np.subtract))
            case LinkKind.EMPTY:
                pass
        state = replace(state, version=state.version + 1)
        if not state.pool.updates:
            state = replace(state, pool=FigurePool(began=state.version), offered=None)
        concealed = self._ring.group.conceal(state.digest)
        return replace(state, history=state.history.after(link.kind, link.contents, concealed, counted)), figures

    def _add(self, state: ReplicaState, entry: ReadEntry, opened: _Opened) -> tuple[ReplicaState, PooledFigures | None]:
        added = dict(state.added)
        for member in entry.members:
            admit(member, added, self._ring)
        members = members_of([entry.sums[index] for index in opened.counted])
        voters = [member.silo for member in members]
        scales = state.scales.after(len(entry.members), opened.tally, opened.shown, voters, self._plan)
        figures = None
        if opened.tally is not None:
            if opened.tally.fault:
                _log_spoiled(entry.version, members, _spoiled("evaluation", opened.tally.fault), "evaluation")
            state, figures = self._pooled(state, opened, opened.tally, members)
        if opened.spoiled:
            figures = replace(figures or PooledFigures(entry.version, None), spoiled=opened.spoiled)
        state = replace(state, scales=scales, added=added)
        if self._plan.optimizer is not None:
            return self._stepped(self._plan.optimizer, state, opened, members), figures
        return replace(state, model=_moved(state.model, opened.change, np.add)), figures

    def _stepped(
        self, optimizer: ServerOptimizer, state: ReplicaState, opened: _Opened, members: Sequence[Member]
    ) -> ReplicaState:
        """The state with its model moved by what the optimizer makes of a change, in whose memory the model is then."""
        pace, change = optimizer.pace([state.version - member.round for member in members]), opened.change
        backing, counted = None, state.counted
        if optimizer.controls and opened.tally is not None:
            counted = {**counted, **dict(serial_of(member.update_id) for member in members)}
            steps, newcomers = opened.tally.effective_progress, len(counted) - len(state.counted)
            backing = Backing(self._plan.weighting.rate * steps, opened.tally.weight, len(members), newcomers)
        advanced = optimizer.advance(state.moments, change, pace, _MEMORY, backing)
        if advanced is None:
            return state
        moments, step = advanced
        for start, stop in spans(change.size, change.itemsize):
            change[start:stop] = step(start, stop)
        return replace(state, model=_moved(state.model, change, np.add), moments=moments, counted=counted)

    def _pooled(
        self, state: ReplicaState, opened: _Opened, added_up: Tally, members: Sequence[Member]
    ) -> tuple[ReplicaState, PooledFigures | None]:
        """The state with the figures of one more version, whose change it has not yet; and those of enough silos."""
        plan, at = self._plan, state.version
        if added_up.question != ROUNDS:
            panel, figures = answer(at + 1, added_up, members, plan.quorum, plan.metrics, state.panel)
            if figures is not None and figures.score is not None and figures.subject is Subject.BEST and state.best:
                figures = replace(figures, score=replace(figures.score, version=state.best.version))
            return replace(state, panel=panel), figures
        pool, figures = state.pool.after(at + 1, added_up, members, plan.quorum, plan.metrics)
        if plan.selection is None:
            return replace(state, pool=pool), figures
        if figures is None:
            offered = state.offered
            if at in (pool.began, pool.offered):
                offered = KeptModel.of(at, state.model)
            return replace(state, pool=pool, offered=offered), None
        best, score = state.best, figures.score
        if score is not None and surpasses(score, best, plan.selection):
            if score.version == at:
                best = KeptModel.of(at, state.model, score)
            elif state.offered is not None and state.offered.version == score.version:
                best = replace(state.offered, score=score)
        figures = replace(figures, best=None if best is None else best.score)
        return replace(state, pool=pool, best=best, offered=None), figures

    def _judged(self, state: ReplicaState, entry: ReadEntry) -> _Opened:
        """What an entry brings without its spoiled sums.

        Whether a sum is spoiled does not depend on the others, so they are opened twice at most.
        """
        spoiled: dict[int, ProtocolError] = {}
        grids, optimizer = self._grids(state), self._plan.optimizer
        for index, one in enumerate(entry.sums):
            if one.head.grid not in grids:
                spoiled[index] = _spoiled("grid", "sealed on a grid that nobody agreed on")
            if any(state.history.chain(member.round) != member.chain for member in one.head.members):
                spoiled[index] = _spoiled("chain", "built on another past")
            if optimizer is not None and optimizer.controls and any(m.round != state.version for m in one.head.members):
                spoiled[index] = _spoiled("age", "its steps were corrected by an older version")
        known, by_server = -1, set(spoiled)
        while known < len(spoiled):
            known = len(spoiled)
            good = [index for index in range(len(entry.sums)) if index not in spoiled]
            silos = {member.silo for member in members_of([entry.sums[index] for index in good])}
            opened = self._change(state, entry, good if len(silos) >= self._plan.members else [], spoiled)
        for index, error in spoiled.items():
            _log_spoiled(entry.version, entry.sums[index].head.members, error)
        if not _bounded(opened.change):
            error = _spoiled("size", f"the model would change by more than {MOST:g}")
            _log_spoiled(entry.version, entry.members, error)
            opened = self._change(state, entry, [], {})
        heads = [entry.sums[index] for index in spoiled.keys() - by_server]
        return replace(opened, spoiled=tuple(sorted({member.silo for member in members_of(heads)})))

    def _added(self, state: ReplicaState, entry: ReadEntry) -> list[int]:
        """The sums of an earlier version that were added, if all can still be opened."""
        counted, grids = state.history.records.counted(entry.version), self._grids(state)
        added = [index for index in range(len(entry.sums)) if counted >> index & 1]
        if all(entry.sums[index].head.grid in grids for index in added):
            return added
        logger.warning("version %d cannot be taken back: its grid is forgotten", entry.version)
        return []

    def _change(
        self, state: ReplicaState, entry: ReadEntry, chosen: Sequence[int], spoiled: dict[int, ProtocolError]
    ) -> _Opened:
        """What these sums of an entry change the model by.

        Args:
            state: before.
            entry: whose sums they are.
            chosen: which.
            spoiled: where those of them are put down that turn out to be spoiled; what is returned is of no use then.
        """
        plan, weighting = self._plan, self._plan.weighting
        grids, (sealer, pipeline) = self._grids(state), self._unmasked(entry.unmasker)
        tallies: dict[int, Tally] = {}
        for index in chosen:
            one = entry.sums[index]
            with _noted(spoiled, index):
                tallies[index] = self._tally(sealer.open(one.first, one.head.members), one)
        change = np.zeros(plan.sealed.size, dtype=np.float32)
        # What travels in the clear cannot be told apart by sums.
        clear = entry.clear if len(tallies) == len(entry.sums) else np.zeros_like(entry.clear)
        if not tallies:
            return _Opened(plan.unite(change, clear))
        added_up = tally.together(list(tallies.values()))
        factor = weighting.rate * added_up.mean_factor(plan.cap, normalised=weighting.normalised)
        for index in tallies:
            one = entry.sums[index]
            slots = open_portions(one.spans(), one.head.members, pipeline, SERVER)
            # A header may claim anything: what comes of it is looked at in the end.
            with _noted(spoiled, index), np.errstate(over="ignore", invalid="ignore"):
                grids[one.head.grid].decode(slots, factor, change, len(one.head.members), SERVER)
        sane = _bounded(change)
        shown = needed_exponents(change, plan.sealed, 1 / factor, plan.bits) if sane else plan.first_exponents
        return _Opened(plan.unite(change, clear), added_up, tuple(tallies), shown)

    def _grids(self, state: ReplicaState) -> dict[bytes, QuantizationGrid]:
        return state.scales.grids(self._plan, self._ring.group)

    def _unmasked(self, unmasker: Unmasker | None) -> tuple[Sealer, Pipeline]:
        """What opens one entry's sums."""
        if unmasker is None:
            return self._sealer, self._pipeline
        sealer = Masked(self._sealer, unmasker=unmasker)
        return sealer, Serial(sealer)

    def _tally(self, slots: Slots, sealed: Authentic) -> Tally:
        return tally.read(slots, len(sealed.head.members), self._plan.cap, self._plan.header, SERVER)


def _moved(model: Vector, change: Vector, by: np.ufunc) -> Vector:
    """The next model, in the memory of the change: nobody else has it, and a model is large."""
    for start, stop in spans(model.size, model.itemsize):
        by(model[start:stop], change[start:stop], out=change[start:stop])
        give_back(model)
    return change


def _bounded(change: Vector) -> bool:
    """Whether no value is beyond `MOST`, or no number."""
    return bool(change.max(initial=0) <= MOST and change.min(initial=0) >= -MOST)


def _spoiled(check: str, detail: str) -> ProtocolError:
    return ProtocolError("sum of silos", check, detail)


@contextmanager
def _noted(spoiled: dict[int, ProtocolError], index: int) -> Iterator[None]:
    """What fails within was authentic: it is the doing of a silo that has the key, not of the server."""
    try:
        yield
    except ProtocolError as error:
        spoiled[index] = error


def _log_spoiled(version: int, members: Sequence[Member], error: ProtocolError, what: str = "sum") -> None:
    ids = ", ".join(member.update_id for member in members)
    text = "version %d: the %s of %s brings nothing, one of them spoiled it: %s"
    logger.warning(text, version, what, ids, error.detail)
