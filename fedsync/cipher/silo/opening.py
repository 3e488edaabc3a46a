"""Decryption (opening) of authenticated sums, and their application to the model.

The result is a pure function of the sums, in order, so all silos have the same model to the last bit. Each link is
added separately, in the order of versions and of its sums, with float32 operations that round identically everywhere.
An authentic sum was sealed by silos, and a silo may lie. A sum is *spoiled* if its content is invalid:

| invalid content of a sum | check that detects it |
|---|---|
| updates from another run or another history | D of its updates, before decryption |
| a grid that silos did not agree on | digest of the grid, before decryption |
| updates of fewer silos than ``members`` | names of its updates, before decryption |
| with control variates: updates that start from an older version; the server's fault | versions of its updates |
| a header that is no sum of headers | `tally.read` |
| masks whose seeds do not fit their commitments | `tally.read`, because the decrypted values are random |
| values beyond the clipping range, or after the model's last value | `QuantizationGrid.decode` |
| a header that makes the model's change larger than `MOST` | size of the change; all sums of the link are skipped |

A spoiled sum changes nothing, at any silo, and the run continues. The set of added sums is remembered (S of
`fedsync.cipher.silo.history`), so that a later undo reverts only these sums. If the run has a server optimizer, it
turns the change into a step; its moments are in the state. Then UNDO links are refused: no silo knows earlier moments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from fedsync.cipher.encoding import catch_up, tally
from fedsync.cipher.encoding.catch_up import LinkKind, Start
from fedsync.cipher.encoding.integrity import Authentic, Authenticator
from fedsync.cipher.encoding.packing import Slots
from fedsync.cipher.encoding.quantization import needed_exponents
from fedsync.cipher.encoding.tally import ROUNDS, Tally
from fedsync.cipher.keys.keyring import Ring
from fedsync.cipher.keys.material import Purpose
from fedsync.cipher.masking.masks import Masked
from fedsync.cipher.plan import EncryptionPlan
from fedsync.cipher.silo.catch_up_checks import CatchUpReader, ReadEntry, ReadLink, admit, members_of
from fedsync.cipher.silo.figure_pool import FigurePool, KeptModel, answer, surpasses
from fedsync.cipher.silo.history import History, added_content, run_digest
from fedsync.cipher.silo.replica_state import CALIBRATED, ReplicaState, Scales
from fedsync.cipher.silo.sealing import Pipeline, Serial, open_portions
from fedsync.cipher.suites.suite import Member, Sealer
from fedsync.common import foreign
from fedsync.common.errors import SERVER, ProtocolError
from fedsync.core.orders import PooledFigures, Subject
from fedsync.model.chunked_arrays import ArrayKeeper, give_back, spans
from fedsync.model.control_variates import backed
from fedsync.model.layout import Vector
from fedsync.model.server_optimizer import ServerOptimizer
from fedsync.model.transfer import Payload

logger = foreign.logger(__name__)

_MEMORY = ArrayKeeper()

MOST = 2.0**64  # largest change of a value in one version: even many versions reach no infinity


@dataclass(frozen=True, slots=True, eq=False)
class _Opened:
    """Effect of one entry on the model: ``change`` is float32 [values], a private array.

    ``tally`` sums the headers of the ``counted`` sums. ``shown`` has the exponents that the largest values need, as for
    a single update. ``spoiled`` names the silos in sums that only a silo can have spoiled.
    """

    change: Vector
    tally: Tally | None = None
    counted: tuple[int, ...] = ()
    shown: tuple[int, ...] = ()
    spoiled: tuple[str, ...] = ()


class Opener:
    """Opener of verified catch-ups; it changes only the states that it returns."""

    def __init__(self, plan: EncryptionPlan, ring: Ring, sealer: Sealer, pipeline: Pipeline) -> None:
        self._plan, self._ring, self._sealer, self._pipeline = plan, ring, sealer, pipeline

    def begin(self, calibration: Authentic, model: Vector, run: bytes) -> ReplicaState:
        """Make version 0 of run R from the untrained model and the silos' headers with the size of their updates.

        A spoiled calibration is ignored; silos then agree on exponents after their first updates.
        """
        plan, members = self._plan, calibration.head.members
        first = plan.first_exponents
        try:
            if any(member.chain != run for member in members):
                raise _spoiled("chain", "a silo is in another run")
            slots = self._sealer.open(calibration.first, members)
            added_up = self._tally(slots, calibration)
            spared = tally.votes_spared(Counter(member.silo for member in members), plan.colluding)
            voted = tally.next_exponents(added_up, first, spared, plan.headroom)
            if plan.noise is None:  # No values exist yet that would confirm larger exponents.
                first = tuple(map(min, (one + CALIBRATED for one in first), voted))
        except ProtocolError as error:
            _log_spoiled(0, members, error)
        state = ReplicaState(0, model, Scales((first,)), {}, History(run))
        if plan.optimizer is not None:
            state = replace(state, moments=plan.optimizer.begin(model.size, _MEMORY))
        concealed = self._ring.group.conceal(state.digest)
        return replace(state, history=state.history.begin(added_content([calibration.head], b""), concealed))

    def follow(self, state: ReplicaState, link: ReadLink) -> tuple[ReplicaState, PooledFigures | None]:
        """Apply one link; return the state one version later, and published figures if there are any."""
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
        stale, change = [state.version - member.round for member in members], opened.change
        backing, counted = None, state.counted
        if optimizer.controls and opened.tally is not None:
            steps = self._plan.weighting.rate * opened.tally.effective_progress
            counted, backing = backed(counted, [member.update_id for member in members], steps, opened.tally.weight)
        advanced = optimizer.advance(state.moments, change, stale, _MEMORY, backing)
        if advanced is None:
            return state
        moments, step = advanced
        for start, stop in spans(change.size, change.itemsize):
            change[start:stop] = step(start, stop)
        return replace(state, model=_moved(state.model, change, np.add), moments=moments, counted=counted)

    def _pooled(
        self, state: ReplicaState, opened: _Opened, added_up: Tally, members: Sequence[Member]
    ) -> tuple[ReplicaState, PooledFigures | None]:
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
        """Effect of an entry without its spoiled sums. A sum is spoiled by itself, so sums are opened at most twice."""
        spoiled: dict[int, ProtocolError] = {}
        grids, optimizer = state.scales.grids(self._plan, self._ring.group), self._plan.optimizer
        for index, one in enumerate(entry.sums):
            if (few := len({member.silo for member in one.head.members})) < self._plan.members:
                spoiled[index] = _spoiled("members", f"{few} silos are in it, and {self._plan.members} must be")
            if one.head.grid not in grids:
                spoiled[index] = _spoiled("grid", "encrypted on a grid that silos did not agree on")
            if any(state.history.chain(member.round) != member.chain for member in one.head.members):
                spoiled[index] = _spoiled("chain", "computed from another history")
            if optimizer is not None and optimizer.controls and any(m.round != state.version for m in one.head.members):
                spoiled[index] = _spoiled("age", "its steps were corrected by an older version")
        known, by_server = -1, set(spoiled)
        while known < len(spoiled):
            known = len(spoiled)
            good = [index for index in range(len(entry.sums)) if index not in spoiled]
            opened = self._change(state, entry, good, spoiled)
        for index, error in spoiled.items():
            _log_spoiled(entry.version, entry.sums[index].head.members, error)
        if not _bounded(opened.change):
            error = _spoiled("size", f"the model would change by more than {MOST:g}")
            _log_spoiled(entry.version, entry.members, error)
            opened = self._change(state, entry, [], {})
        heads = [entry.sums[index] for index in spoiled.keys() - by_server]
        return replace(opened, spoiled=tuple(sorted({member.silo for member in members_of(heads)})))

    def _added(self, state: ReplicaState, entry: ReadEntry) -> list[int]:
        counted = state.history.records.counted(entry.version)
        grids = state.scales.grids(self._plan, self._ring.group)
        added = [index for index in range(len(entry.sums)) if counted >> index & 1]
        if all(entry.sums[index].head.grid in grids for index in added):
            return added
        logger.warning("version %d cannot be undone: its grid is no longer stored", entry.version)
        return []

    def _change(
        self, state: ReplicaState, entry: ReadEntry, chosen: Sequence[int], spoiled: dict[int, ProtocolError]
    ) -> _Opened:
        """Change of the model by the chosen sums. If ``spoiled`` receives a sum, the result is useless."""
        plan, weighting = self._plan, self._plan.weighting
        grids = state.scales.grids(plan, self._ring.group)
        sealer, pipeline = self._sealer, self._pipeline
        if entry.unmasker is not None:
            sealer = Masked(self._sealer, entry.unmasker.unmask)
            pipeline = Serial(sealer)
        tallies: dict[int, Tally] = {}
        for index in chosen:
            one = entry.sums[index]
            with _noted(spoiled, index):
                tallies[index] = self._tally(sealer.open(one.first, one.head.members), one)
        change = np.zeros(plan.sealed.size, dtype=np.float32)
        # Values in the clear cannot be split by sums, so they count only if all sums count.
        clear = entry.clear if len(tallies) == len(entry.sums) else np.zeros_like(entry.clear)
        if not tallies:
            return _Opened(plan.unite(change, clear))
        added_up = tally.together(list(tallies.values()))
        factor = weighting.rate * added_up.mean_factor(plan.cap, normalised=weighting.normalised)
        for index in tallies:
            one = entry.sums[index]
            slots = open_portions(one.spans(), one.head.members, pipeline, SERVER)
            # A header may claim anything: the resulting change is checked at the end.
            with _noted(spoiled, index), np.errstate(over="ignore", invalid="ignore"):
                grids[one.head.grid].decode(slots, factor, change, len(one.head.members), SERVER)
        sane = _bounded(change)
        shown = needed_exponents(change, plan.sealed, 1 / factor, plan.bits) if sane else plan.first_exponents
        # These follow a mean: silos divided them by no progress, and no rate carries them further.
        beyond = max(weighting.rate, 1.0) * (added_up.effective_progress if weighting.normalised else 1.0)
        for start, stop in plan.averages:
            change[start:stop] /= np.float32(beyond)
        return _Opened(plan.unite(change, clear), added_up, tuple(tallies), shown)

    def _tally(self, slots: Slots, sealed: Authentic) -> Tally:
        return tally.read(slots, len(sealed.head.members), self._plan.cap, self._plan.header, SERVER)


def _moved(model: Vector, change: Vector, by: np.ufunc) -> Vector:
    for start, stop in spans(model.size, model.itemsize):
        by(model[start:stop], change[start:stop], out=change[start:stop])
        give_back(model)
    return change


def _bounded(change: Vector) -> bool:
    return bool(change.max(initial=0) <= MOST and change.min(initial=0) >= -MOST)


def _spoiled(check: str, detail: str) -> ProtocolError:
    return ProtocolError("sum of silos", check, detail)


@contextmanager
def _noted(spoiled: dict[int, ProtocolError], index: int) -> Iterator[None]:
    """Record a failure as caused by a silo: the sum was authentic, so the server cannot have caused it."""
    try:
        yield
    except ProtocolError as error:
        spoiled[index] = error


def _log_spoiled(version: int, members: Sequence[Member], error: ProtocolError, what: str = "sum") -> None:
    ids = ", ".join(member.update_id for member in members)
    why = "" if error.check == "members" else ", one of them made it invalid"
    logger.warning("version %d: the %s of %s is ignored%s: %s", version, what, ids, why, error.detail)


def model_of(
    plan: EncryptionPlan, ring: Ring, sealer: Sealer, run: str, specification: bytes, received: Payload, first: Vector
) -> Vector:
    """Compute the model of a finished run from all of its sums, float32 [plan.layout.size], without any kept state.

    The result equals, to the last bit, the model of a silo that added the same sums. Everything is verified before
    anything is opened. ``received`` is a `CatchUp` from the beginning of the run; ``specification`` is the SHA-256 of
    the run's specification; ``first`` is the model before any training. Raise `ProtocolError` if ``received`` is
    something else, and `SpoiledSum` if silos meant another run.
    """
    digest = run_digest(run, specification, ring.group.epoch, ring.group.fingerprint)
    reader = CatchUpReader(plan, ring, Authenticator(ring.group.derive(Purpose.TAG), plan.form), digest)
    whole = catch_up.decode(received)
    if whole.start is not Start.HELD or whole.base != -1:
        raise ProtocolError(SERVER, "catch-up", "it does not begin with the first version")
    calibration, links = reader.read(whole, None)
    if calibration is None:
        raise ProtocolError(SERVER, "catch-up", "it has no calibration")
    opener = Opener(plan, ring, sealer, Serial(sealer))
    state = opener.begin(calibration, first, digest)
    for link in links:
        state, _ = opener.follow(state, link)
    reader.check_claims(links, state.history.known(), None, None)
    return state.model
