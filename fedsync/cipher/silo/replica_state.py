"""State of a silo in an encrypted run, kept between two orders, and its format in files and snapshots.

A *snapshot* is a silo's state, sealed for silos that join, and signed by its author:

    `fedsync.cipher.encoding.catch_up.SignedSnapshot`, and in it under AES-GCM with a key of the group:
    length of the state [8] | the state (`ReplicaState.whole`) | zeros

The server stores snapshots and cannot read them; a silo may lie in a snapshot. The server also checks the author's
signature. Wrong content with a valid signature is therefore the author's lie, not the server's forgery. The newest D of
the state's history must fit the state. A silo that begins with the state requires updates of other silos whose D
includes it: see `fedsync.cipher.silo.catch_up_checks`. Zeros make all snapshots of a run equally long: the number of
digits of exponents and losses would disclose something to the server.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from fedsync.cipher.encoding.catch_up import SignedSnapshot
from fedsync.cipher.encoding.packing import MAX_EXPONENT, MIN_EXPONENT
from fedsync.cipher.encoding.quantization import QuantizationGrid
from fedsync.cipher.encoding.tally import BINS, HeaderForm, Tally, next_exponents, together, votes_spared
from fedsync.cipher.keys.keyring import Ring
from fedsync.cipher.keys.material import GroupKey, Purpose, open_blob, seal_blob
from fedsync.cipher.plan import EncryptionPlan
from fedsync.cipher.silo.figure_pool import FOLDER, FigurePool, KeptModel, Panel, file_of, remove_others
from fedsync.cipher.silo.history import History, digest_of
from fedsync.common import foreign
from fedsync.common.errors import SERVER, ProtocolError, SpoiledSum
from fedsync.common.files import OWNER_FILE, checksum, undigested, write_pieces
from fedsync.core.orders import Evaluation, Score
from fedsync.model.chunked_arrays import map_file
from fedsync.model.layout import Vector, as_bytes
from fedsync.model.server_optimizer import MOST_POWERS, Moments, ServerOptimizer

logger = foreign.logger(__name__)

MAX_GRIDS = 64  # remembered grids; an update on an older grid can no longer be opened

CALIBRATED = 4  # octaves by which a calibration may raise an exponent: first values up to 16 are not clipped

FREE = -8  # exponents up to this bound need only votes: a tensor of zeros will have values some day

_HIDDEN = 3  # bits by which a silo's largest value may exceed the sum's, where other silos' values hide it

_LONGEST = -1.2345678901234567e-308  # a number with the largest possible number of digits

_ALIGNED = 32  # length of a checksum; values behind a checksum are then aligned for the processor

SEEN = 64  # remembered serials of each silo's updates; older serials count as added


@dataclass(frozen=True, slots=True)
class Scales:
    """Agreements of the silos on exponents, the same at all silos.

    Args:
        exponents: exponents of the tensors, one tuple for each change, the newest last, at most `MAX_GRIDS`.
        count: updates added since the last agreement, including those that could not be opened.
        voters: votes of each silo since then, one with each opened update; ``votes`` is the sum of their tallies.
        shown: exponent that each tensor's largest value in the opened sums needs; empty where there are no votes.
        usual: mean weight n_i of the newest opened updates; 0 if unknown. It is not stored, and silos may differ in it.
    """

    exponents: tuple[tuple[int, ...], ...]
    count: int = 0
    voters: Mapping[str, int] = field(default_factory=dict)
    votes: Tally | None = None
    shown: tuple[int, ...] = ()
    usual: float = field(default=0.0, compare=False)

    def grids(self, plan: EncryptionPlan, group: GroupKey) -> dict[bytes, QuantizationGrid]:
        """Grids that updates may be sealed on, by concealed digest."""
        agreed = [plan.grid(exponents) for exponents in self.exponents]
        return {group.conceal(grid.digest): grid for grid in agreed}

    def after(
        self, count: int, tally: Tally | None, shown: Sequence[int], voters: Iterable[str], plan: EncryptionPlan
    ) -> Scales:
        """Count the updates of one commit; silos agree on new exponents after ``quorum`` updates.

        A silo can claim more votes than it has, at the cost of other silos. So votes raise an exponent only as far as
        the values in the sum of these updates confirm (``shown``), or as on a remembered grid. ``tally`` sums the
        headers of the opened updates; ``voters`` sent these updates.
        """
        if plan.noise is not None:
            return self
        known = [votes for votes in (self.votes, tally) if votes is not None]
        votes = together(known) if known else None
        counts = Counter(self.voters)
        counts.update(voters)
        shown = tuple(map(max, self.shown or shown, shown or self.shown))
        usual = self.usual if tally is None else tally.weight / tally.count
        if self.count + count < plan.quorum:
            return replace(self, count=self.count + count, voters=dict(counts), votes=votes, shown=shown, usual=usual)
        following = self.exponents[-1]
        if votes is not None:
            spared = votes_spared(counts, plan.colluding)
            voted = next_exponents(votes, following, spared, plan.headroom)
            most = (max(FREE, one + _HIDDEN + plan.headroom) for one in shown)
            following = tuple(map(min, voted, map(max, most, *self.exponents)))
        changed = () if following == self.exponents[-1] else (following,)
        return Scales((*self.exponents, *changed)[-MAX_GRIDS:], usual=usual)


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """State of one silo; ``version`` is -1 before the first model. ``model`` is float32 [values].

    Args:
        added: newest serials of each silo's added updates, ascending, so that no update is added twice.
        pool: figures of too few silos; ``offered`` is the older model that their score may belong to.
        panel: silos whose test samples the answers cover; None before the first published answer.
        counted: where silos keep control variates, the serial of each silo's newest update in a version.
    """

    version: int
    model: Vector
    scales: Scales
    added: Mapping[str, tuple[int, ...]]
    history: History
    pool: FigurePool = field(default_factory=FigurePool)
    best: KeptModel | None = None
    offered: KeptModel | None = None
    moments: Moments = field(default_factory=Moments)
    panel: Panel | None = None
    counted: Mapping[str, int] = field(default_factory=dict)

    @property
    def kept(self) -> tuple[KeptModel, ...]:
        return tuple(each for each in (self.best, self.offered) if each is not None)

    @property
    def digest(self) -> bytes:
        """A: SHA-256 of everything but the history, in a canonical encoding."""
        return digest_of(self._about(), *self._vectors)

    @property
    def _vectors(self) -> tuple[memoryview, ...]:
        return tuple(as_bytes(each).data for each in (self.model, *self.moments.vectors))

    def _about(self) -> bytes:
        scales, votes = self.scales, self.scales.votes
        about: dict[str, Any] = {
            "version": self.version,
            "exponents": scales.exponents,
            "count": scales.count,
            "voters": dict(scales.voters),
            "shown": scales.shown,
            "votes": None if votes is None else [votes.count, votes.tensors, votes.votes.tolist()],
            "added": dict(self.added),
            "pool": self.pool.to_json(),
        }
        kept = {"best": self.best, "offered": self.offered, "panel": self.panel}
        about |= {name: None if each is None else each.to_json() for name, each in kept.items()}
        if self.moments.vectors:
            about["moments"] = [self.moments.steps, *self.moments.powers]
        if self.counted:
            about["counted"] = dict(self.counted)
        return json.dumps(about, separators=(",", ":"), sort_keys=True).encode()

    @classmethod
    def most_bytes(cls, plan: EncryptionPlan, silos: Iterable[str]) -> int:
        """Upper bound of the bytes of a run's states: every number has as many digits as it can have."""
        tensors, none = plan.header.tensors, np.empty(0, np.float32)
        number, names = 10**15, frozenset(silos)
        exponents = (MIN_EXPONENT,) * tensors
        votes = Tally(number, 0, 0.0, np.full((plan.header.groups, BINS), 999), tensors, 0, None)
        scales = Scales((exponents,) * MAX_GRIDS, number, dict.fromkeys(names, number), votes, exponents)
        added = dict.fromkeys(names, (number,) * SEEN)
        sums = {one.key: (_LONGEST,) * one.size for one in plan.statistics}
        found = Evaluation(_LONGEST, _LONGEST, number**3, sums=sums)
        figures = FigurePool(names, number, _LONGEST, names, number, found, number, number)
        score = Score(number, _LONGEST, _LONGEST, {each.name: _LONGEST for each in plan.metrics})
        kept = KeptModel(number, none, "0" * 64, score)
        moments = Moments(number, (_LONGEST,) * MOST_POWERS, (none,))
        panel, counted = Panel(names, number**2), dict.fromkeys(names, number)
        fullest = cls(number, none, scales, added, History(b""), figures, kept, kept, moments, panel, counted)
        return History.MOST_BYTES + 8 + len(fullest._about()) + _ALIGNED + plan.layout.nbytes * plan.most_models

    @property
    def pieces(self) -> tuple[bytes | memoryview, ...]:
        """Bytes for a file, without a copy of the model, which begins at a multiple of `_ALIGNED`."""
        history, text = self.history.to_bytes(), self._about()
        text += b" " * (-(len(history) + 8 + len(text)) % _ALIGNED)
        return history, len(text).to_bytes(8, "little"), text, *self._vectors

    @property
    def whole(self) -> tuple[bytes | memoryview, ...]:
        return *self.pieces, *(as_bytes(each.model).data for each in self.kept)

    @classmethod
    def from_bytes(
        cls,
        data: bytes | memoryview,
        values: int,
        header: HeaderForm,
        folder: Path | None = None,
        optimizer: ServerOptimizer | None = None,
    ) -> ReplicaState:
        """Decode `whole` or `pieces`, for bytes that a holder of the group key wrote.

        ``folder`` has the models of earlier versions. Without a folder, they follow in ``data`` after the newest model
        of ``values`` values. Raise `OSError` if a model in ``folder`` is missing, and `ValueError` if the bytes are
        malformed, of another model, or not finite.
        """
        history, at = History.from_bytes(data)
        length, at = int.from_bytes(data[at : at + 8], "little"), at + 8
        try:
            about: dict[str, Any] = json.loads(bytes(data[at : at + length]))
            scales = _scales(about, header)
            added = {str(name): tuple(int(s) for s in serials) for name, serials in about["added"].items()}
            pool = FigurePool.from_json(about["pool"])
            panel = None if about["panel"] is None else Panel.from_json(about["panel"])
            counted = {str(name): int(serial) for name, serial in about.get("counted", {}).items()}
            version, named = int(about["version"]), (about["best"], about["offered"])
            steps, *powers = about.get("moments", [0])
            moments, kept = Moments(int(steps), tuple(map(float, powers))), [each for each in named if each is not None]
            beside = 0 if optimizer is None else optimizer.vectors
            models = _models(data[at + length :], values, kept, folder, beside)
            model = next(models)
            moments = replace(moments, vectors=tuple(next(models) for _ in range(beside)))
            best, offered = (None if each is None else KeptModel.from_json(each, next(models)) for each in named)
        except (KeyError, IndexError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"not a silo's state: {error!r}") from error
        if optimizer is not None:
            optimizer.check(moments)
        sizes = {each.key: each.size for each in header.statistics}
        if pool.evaluation is not None and {key: len(each) for key, each in pool.evaluation.sums.items()} != sizes:
            raise ValueError("sums of other statistics than the run's")
        if version != history.records.newest:
            raise ValueError(f"version {version} of a model, which has another's history")
        return cls(version, model, scales, added, history, pool, best, offered, moments, panel, counted)

    def save(self, file: Path) -> Self:
        """Write the file, which is on disk when this returns; return the state with models mapped from files. The next
        state replaces the file, not its content. Raise `ConfigError` if the disk refuses.
        """
        folder, parts = file.parent / FOLDER, self.pieces
        best, offered = (None if each is None else each.in_file(folder) for each in (self.best, self.offered))
        write_pieces(file, (checksum(*parts), *parts), OWNER_FILE)
        remove_others(folder, self.kept)
        return replace(self, best=best, offered=offered)._mapped(file)

    def _mapped(self, file: Path) -> Self:
        size, nbytes, count = self.model.size, self.model.nbytes, 1 + len(self.moments.vectors)
        if not size:
            return self
        begins = file.stat().st_size - nbytes * count
        model, *vectors = (map_file(file, "<f4", begins + each * nbytes, size) for each in range(count))
        return replace(self, model=model, moments=replace(self.moments, vectors=tuple(vectors)))

    @classmethod
    def load(
        cls, file: Path, values: int, header: HeaderForm, optimizer: ServerOptimizer | None = None
    ) -> ReplicaState | None:
        """Load what `save` wrote; None without a file, or, with a warning, if the file is damaged."""
        if not file.exists():
            return None
        try:
            body = undigested(map_file(file).data)
            if body is None:
                raise ValueError("its checksum does not fit")
            return cls.from_bytes(body, values, header, file.parent / FOLDER, optimizer)._mapped(file)
        except (OSError, ValueError) as error:
            remedy = "This silo begins without a model, and the server sends it what it needs"
            logger.warning("%s is damaged: %s. %s; if it happens again, check the disk", file, error, remedy)
            return None


def _scales(about: Mapping[str, Any], header: HeaderForm) -> Scales:
    exponents = tuple(tuple(int(e) for e in one) for one in about["exponents"])
    voters = {str(name): int(count) for name, count in about["voters"].items()}
    votes: Tally | None = None
    if about["votes"] is not None:
        count, voted, counters = int(about["votes"][0]), about["votes"][1], np.array(about["votes"][2], dtype=np.int64)
        if voted != header.tensors or counters.shape != (header.groups, BINS) or (counters < 0).any():
            raise ValueError(f"votes for {header.tensors} tensors, {counters.shape}")
        if (counters.sum(axis=1) != count).any():
            raise ValueError(f"not {count} votes for each group of tensors")
        votes = Tally(count, 0, 0.0, counters, header.tensors, 0, None)
    shown = tuple(int(e) for e in about["shown"])
    if not 1 <= len(exponents) <= MAX_GRIDS or any(len(one) != header.tensors for one in exponents):
        raise ValueError(f"{len(exponents)} grids, or of other tensors")
    if len(shown) != (0 if votes is None else header.tensors):
        raise ValueError(f"{len(shown)} tensors with values")
    if any(not MIN_EXPONENT <= e <= MAX_EXPONENT for one in (*exponents, shown) for e in one):
        raise ValueError("exponents that no tensor can have")
    return Scales(exponents, int(about["count"]), voters, votes, shown)


def _models(
    data: bytes | memoryview, values: int, kept: Sequence[Any], folder: Path | None, moments: int
) -> Iterator[Vector]:
    """Yield the newest model, then ``moments`` moments, then each earlier model, float32 [values]."""
    whole = np.frombuffer(data, dtype="<f4")
    if whole.size != values * (1 + moments + (0 if folder is not None else len(kept))):
        raise ValueError(f"models of {whole.size} values, of which the model has {values}")
    inside = (whole[start : start + values].astype(np.float32) for start in range(0, whole.size, values))
    outside = () if folder is None else (map_file(file_of(folder, each), np.float32) for each in kept)
    for model in (*inside, *outside):
        if model.size != values or not np.isfinite(model).all():
            raise ValueError("a model that is not finite, or of another size")
        yield model


_LENGTH = struct.Struct("<Q")


def seal_snapshot(ring: Ring, plan: EncryptionPlan, state: ReplicaState) -> bytes:
    pieces = state.whole
    length = sum(map(len, pieces))
    most = ReplicaState.most_bytes(plan, ring.group.members)
    filled = b"".join((_LENGTH.pack(length), *pieces, bytes(max(most - length, 0))))
    sealed = seal_blob(ring.group, Purpose.SNAPSHOT, _bound_to(plan), filled)
    return SignedSnapshot.make(ring.own, state.history.run, state.version, sealed)


def open_snapshot(ring: Ring, plan: EncryptionPlan, run: bytes, data: bytes, version: int) -> tuple[str, ReplicaState]:
    """Open a snapshot of ``version``; return author and state. Other silos must still attest that the run reached it.
    Raise `ProtocolError` if no silo of this group made the snapshot, and `SpoiledSum` if the author made a wrong one.
    """
    read = SignedSnapshot.read(data, SERVER)
    author = ring.group.members.get(read.author)
    if author is None or not read.is_of(author.signing):
        raise ProtocolError(SERVER, "snapshot", f"not signed by {read.author!r}, its stated author")
    try:
        content = open_blob(ring.group, Purpose.SNAPSHOT, _bound_to(plan), bytes(read.sealed), read.author)
        (length,) = _LENGTH.unpack_from(content)
        end = _LENGTH.size + length
        body = memoryview(content)[_LENGTH.size : end]
        state = ReplicaState.from_bytes(body, plan.layout.size, plan.header, optimizer=plan.optimizer)
    except (ProtocolError, ValueError, struct.error) as error:
        raise SpoiledSum(read.author, "snapshot", str(error)) from error
    found = state.history.run, state.version, read.run, read.version
    if found != (run, version, run, version) or not state.history.fits(ring.group.conceal(state.digest)):
        detail = f"of version {state.version}, announced as {version}, or not what its history led to"
        raise SpoiledSum(read.author, "snapshot", detail)
    return read.author, state


def _bound_to(plan: EncryptionPlan) -> bytes:
    return plan.grid(plan.first_exponents).digest
