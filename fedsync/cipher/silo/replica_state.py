"""What a silo keeps between two orders under encryption, and its form in files and snapshots."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from fedsync.cipher.encoding.packing import MAX_EXPONENT, MIN_EXPONENT
from fedsync.cipher.encoding.quantization import QuantizationGrid
from fedsync.cipher.encoding.tally import BINS, Tally, next_exponents, together, vote_groups, votes_spared
from fedsync.cipher.keys.material import GroupKey
from fedsync.cipher.plan import EncryptionPlan
from fedsync.cipher.silo.figure_pool import FigurePool
from fedsync.cipher.silo.history import History, digest_of
from fedsync.common.checksums import checksum, undigested
from fedsync.common.files import OWNER_FILE, write_pieces
from fedsync.core.layout import Vector, as_bytes
from fedsync.core.spans import map_file

logger = logging.getLogger(__name__)

MAX_GRIDS = 64
"""Grids remembered: an update sealed on an older one cannot be opened any more."""

CALIBRATED = 4
"""Octaves by which a calibration may raise an exponent: values up to 16 are not clipped in the first updates."""

FREE = -8
"""Exponents up to this one are taken on votes alone: a tensor of zeros has values some day."""

_HIDDEN = 3
"""Bits by which a silo's largest value may be larger than any of the sum, where the others' hide it."""

_LONGEST = -1.2345678901234567e-308
"""A number with as many digits as any has."""

_ALIGNED = 32
"""As long as a checksum, so that values behind one are where a processor wants them."""

SEEN = 64
"""Serials remembered of each silo's updates; older ones count as added."""


@dataclass(frozen=True, slots=True)
class Scales:
    """What silos agreed on so far, the same at all of them.

    Args:
        exponents: of the tensors, one tuple for each time that they changed, the newest last, at most `MAX_GRIDS`.
        count: updates that were added since the last agreement, also those that could not be opened.
        voters: votes of each silo since then, one with each update that was opened.
        votes: sum of their tallies, or None.
        shown: of each tensor the exponent that the largest value of their sums needs; empty where there are no votes.
    """

    exponents: tuple[tuple[int, ...], ...]
    count: int = 0
    voters: Mapping[str, int] = field(default_factory=dict)
    votes: Tally | None = None
    shown: tuple[int, ...] = ()

    def grids(self, plan: EncryptionPlan, group: GroupKey) -> dict[bytes, QuantizationGrid]:
        """What updates may be sealed on, by the concealed digest that is in their heads."""
        agreed = [plan.grid(exponents) for exponents in self.exponents]
        return {group.conceal(grid.digest): grid for grid in agreed}

    def after(
        self, count: int, tally: Tally | None, shown: Sequence[int], voters: Iterable[str], plan: EncryptionPlan
    ) -> Scales:
        """Once the updates of one commit were added; silos agree anew when there are ``quorum`` of them.

        A silo can write itself more votes than it has, at the cost of others'. So votes raise an exponent no further
        than values bear out, in the sum of these updates, or than it was on a grid that is remembered.

        Args:
            count: of the updates.
            tally: the sum of the headers of those that were opened, or None.
            shown: what their sum needs, exponents; nothing where there is none.
            voters: whose updates those are.
            plan: says how silos agree.
        """
        known = [votes for votes in (self.votes, tally) if votes is not None]
        votes = together(known) if known else None
        counts = Counter(self.voters)
        counts.update(voters)
        shown = tuple(map(max, self.shown or shown, shown or self.shown))
        if self.count + count < plan.quorum:
            return replace(self, count=self.count + count, voters=dict(counts), votes=votes, shown=shown)
        following = self.exponents[-1]
        if votes is not None:
            spared = votes_spared(counts, plan.colluding)
            voted = next_exponents(votes, following, spared, plan.headroom)
            most = (max(FREE, one + _HIDDEN + plan.headroom) for one in shown)
            following = tuple(map(min, voted, map(max, most, *self.exponents)))
        changed = () if following == self.exponents[-1] else (following,)
        return Scales((*self.exponents, *changed)[-MAX_GRIDS:])


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """Of one silo.

    Args:
        version: of the model, -1 before anything came.
        model: float32 [values].
        scales: see `Scales`.
        added: newest serials of each silo's updates that were added, ascending, so that none is added twice.
        history: what led to it.
        pool: figures that are not those of enough silos yet.
    """

    version: int
    model: Vector
    scales: Scales
    added: Mapping[str, tuple[int, ...]]
    history: History
    pool: FigurePool = field(default_factory=FigurePool)

    @property
    def digest(self) -> bytes:
        """A: SHA-256 of all but the history, in one way of writing it."""
        return digest_of(self._about(), as_bytes(self.model).data)

    def _about(self) -> bytes:
        scales, votes = self.scales, self.scales.votes
        about = {
            "version": self.version,
            "exponents": scales.exponents,
            "count": scales.count,
            "voters": dict(scales.voters),
            "shown": scales.shown,
            "votes": None if votes is None else [votes.count, votes.tensors, votes.votes.tolist()],
            "added": dict(self.added),
            "pool": self.pool.to_json(),
        }
        return json.dumps(about, separators=(",", ":"), sort_keys=True).encode()

    @classmethod
    def most_bytes(cls, values: int, tensors: int, silos: Iterable[str]) -> int:
        """No state of a run has more bytes: every number has as many digits as it can have.

        Args:
            values: of the model.
            tensors: of it that are sealed.
            silos: that have a key.
        """
        number, names = 10**15, frozenset(silos)
        exponents = (MIN_EXPONENT,) * tensors
        votes = Tally(number, 0, 0.0, np.full((vote_groups(tensors), BINS), 999), tensors, 0, None)
        scales = Scales((exponents,) * MAX_GRIDS, number, dict.fromkeys(names, number), votes, exponents)
        added = dict.fromkeys(names, (number,) * SEEN)
        figures = FigurePool(names, number, _LONGEST, names, number, _LONGEST, _LONGEST, number**3)
        fullest = cls(number, np.empty(0, np.float32), scales, added, History(b""), figures)
        return History.MOST_BYTES + 8 + len(fullest._about()) + _ALIGNED + 4 * values

    @property
    def pieces(self) -> tuple[bytes | memoryview, ...]:
        """Bytes for a file or a snapshot, without a copy of the model, which begins at a multiple of `_ALIGNED`."""
        history, text = self.history.to_bytes(), self._about()
        text += b" " * (-(len(history) + 8 + len(text)) % _ALIGNED)
        return history, len(text).to_bytes(8, "little"), text, as_bytes(self.model).data

    @classmethod
    def from_bytes(cls, data: bytes | memoryview, values: int, tensors: int) -> ReplicaState:
        """The inverse of `pieces`, for bytes that a holder of the group key wrote.

        Args:
            data: the bytes.
            values: of the model.
            tensors: of it that are sealed, each of which has an exponent.

        Raises:
            ValueError: these are not such bytes, not of such a model, or not finite.
        """
        history, at = History.from_bytes(data)
        length, at = int.from_bytes(data[at : at + 8], "little"), at + 8
        try:
            about: dict[str, Any] = json.loads(bytes(data[at : at + length]))
            exponents = tuple(tuple(int(e) for e in one) for one in about["exponents"])
            voters = {str(name): int(count) for name, count in about["voters"].items()}
            votes = None if about["votes"] is None else _tally(about["votes"], tensors)
            shown = tuple(int(e) for e in about["shown"])
            added = {str(name): tuple(int(s) for s in serials) for name, serials in about["added"].items()}
            pool = FigurePool.from_json(about["pool"])
            version, count = int(about["version"]), int(about["count"])
        except (KeyError, IndexError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"not a silo's state: {error!r}") from error
        model = np.frombuffer(data[at + length :], dtype="<f4").astype(np.float32)
        if model.size != values or not exponents or any(len(one) != tensors for one in exponents):
            raise ValueError(f"a model of {model.size} values, not {values}, or of other tensors")
        if len(shown) != (0 if votes is None else tensors) or len(exponents) > MAX_GRIDS:
            raise ValueError(f"{len(exponents)} grids, and {len(shown)} tensors with values")
        if any(not MIN_EXPONENT <= e <= MAX_EXPONENT for one in (*exponents, shown) for e in one):
            raise ValueError("exponents that no tensor can have")
        if not np.isfinite(model).all() or version != history.records.newest:
            raise ValueError(f"version {version} of a model, which is not finite or has another's history")
        return cls(version, model, Scales(exponents, count, voters, votes, shown), added, history, pool)

    def save(self, file: Path) -> Self:
        """Write the file; it is on disk when this returns.

        Returns:
            The same, whose model is a map of the file; the next state replaces the file, not what is in it.

        Raises:
            ConfigError: the disk does not take it.
        """
        parts = self.pieces
        write_pieces(file, (checksum(*parts), *parts), OWNER_FILE)
        return self._mapped(file)

    def _mapped(self, file: Path) -> Self:
        model = map_file(file, "<f4", file.stat().st_size - self.model.nbytes) if self.model.size else self.model
        return replace(self, model=model)

    @classmethod
    def load(cls, file: Path, values: int, tensors: int) -> ReplicaState | None:
        """What `save` wrote; None where there is no file, and, with a warning, where it is not whole.

        Args:
            file: where.
            values: as for `from_bytes`.
            tensors: as for `from_bytes`.
        """
        if not file.exists():
            return None
        try:
            body = undigested(map_file(file).data)
            if body is None:
                raise ValueError("its checksum does not fit")
            return cls.from_bytes(body, values, tensors)._mapped(file)
        except (OSError, ValueError) as error:
            logger.warning(
                "%s is damaged: %s. This silo begins without a model, and the server sends it what it needs; if it "
                "happens again, check the disk",
                file,
                error,
            )
            return None


def _tally(votes: Any, tensors: int) -> Tally:
    count, voted, counters = int(votes[0]), votes[1], np.array(votes[2], dtype=np.int64)
    if voted != tensors or counters.shape != (vote_groups(tensors), BINS) or (counters < 0).any():
        raise ValueError(f"votes for {tensors} tensors, {counters.shape}")
    if (counters.sum(axis=1) != count).any():
        raise ValueError(f"not {count} votes for each group of tensors")
    return Tally(count, 0, 0.0, counters, tensors, 0, None)
