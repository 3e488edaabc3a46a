"""What a silo keeps between two orders under encryption, and its form in files and snapshots."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedsync.cipher.encoding.tally import Tally, next_exponents, together, votes_spared
from fedsync.cipher.plan import EncryptionPlan
from fedsync.common.checksums import digested, undigested
from fedsync.common.files import OWNER_FILE, write_atomically
from fedsync.core.layout import Vector

logger = logging.getLogger(__name__)

MAX_GRIDS = 64
"""Agreements remembered: an update sealed on an older grid cannot be opened any more."""

SEEN = 64
"""Serials remembered of each silo's updates; older ones count as added."""


@dataclass(frozen=True, slots=True)
class Scales:
    """What silos agreed on so far, the same at all of them.

    Args:
        exponents: of the tensors, one tuple an agreement, the newest last, at most `MAX_GRIDS`.
        voters: votes of each silo since the last agreement, one with each update that was added.
        votes: sum of their tallies, or None.
    """

    exponents: tuple[tuple[int, ...], ...]
    voters: Mapping[str, int] = field(default_factory=dict)
    votes: Tally | None = None

    def after(self, tally: Tally, voters: Iterable[str], plan: EncryptionPlan) -> Scales:
        """Once the updates of one commit were added; silos agree anew when there are ``quorum`` of them.

        Args:
            tally: the sum of their headers.
            voters: whose updates they are.
            plan: says how silos agree.
        """
        votes = tally if self.votes is None else together([self.votes, tally])
        counts = Counter(self.voters)
        counts.update(voters)
        if counts.total() < plan.quorum:
            return replace(self, voters=dict(counts), votes=votes)
        spared = votes_spared(counts, plan.colluding)
        following = next_exponents(votes, self.exponents[-1], spared, plan.headroom)
        return Scales((*self.exponents, following)[-MAX_GRIDS:])


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """Of one silo.

    Args:
        version: of the model, -1 before anything came.
        model: float32 [values].
        scales: see `Scales`.
        added: newest serials of each silo's updates that were added, ascending, so that none is added twice.
    """

    version: int
    model: Vector
    scales: Scales
    added: Mapping[str, tuple[int, ...]]

    def to_bytes(self) -> bytes:
        """For a file or a snapshot."""
        votes = self.scales.votes
        about = {
            "version": self.version,
            "exponents": self.scales.exponents,
            "voters": dict(self.scales.voters),
            "votes": None if votes is None else [votes.count, votes.tensors, votes.votes.tolist()],
            "added": dict(self.added),
        }
        text = json.dumps(about, separators=(",", ":")).encode()
        return len(text).to_bytes(8, "little") + text + self.model.astype("<f4", copy=False).tobytes()

    @classmethod
    def from_bytes(cls, data: bytes, values: int, tensors: int) -> ReplicaState:
        """The inverse of `to_bytes`, for bytes that a holder of the group key wrote.

        Args:
            data: the bytes.
            values: of the model.
            tensors: of it that are sealed, each of which has an exponent.

        Raises:
            ValueError: these are not such bytes, or not of such a model.
        """
        length = int.from_bytes(data[:8], "little")
        try:
            about: dict[str, Any] = json.loads(data[8 : 8 + length])
            exponents = tuple(tuple(int(e) for e in one) for one in about["exponents"])
            votes = None if about["votes"] is None else _tally(*about["votes"])
            added = {str(name): tuple(int(s) for s in serials) for name, serials in about["added"].items()}
            voters = {str(name): int(count) for name, count in about["voters"].items()}
            version = int(about["version"])
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"not a silo's state: {error!r}") from error
        model = np.frombuffer(data[8 + length :], dtype="<f4").astype(np.float32)
        if model.size != values or not exponents or any(len(one) != tensors for one in exponents):
            raise ValueError(f"a model of {model.size} values, not {values}, or of other tensors")
        return cls(version, model, Scales(exponents, voters, votes), added)

    def save(self, file: Path) -> None:
        """Write the file; it is on disk when this returns.

        Raises:
            ConfigError: the disk does not take it.
        """
        write_atomically(file, digested(self.to_bytes()), OWNER_FILE)

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
            body = undigested(file.read_bytes())
            if body is None:
                raise ValueError("its checksum does not fit")
            return cls.from_bytes(body, values, tensors)
        except (OSError, ValueError) as error:
            logger.warning(
                "%s is damaged: %s. This silo begins without a model, and the server sends it what it needs; if it "
                "happens again, check the disk",
                file,
                error,
            )
            return None


def _tally(count: int, tensors: int, votes: list[list[int]]) -> Tally:
    return Tally(count, 0, 0.0, np.array(votes, dtype=np.int64), tensors, 0, None)
