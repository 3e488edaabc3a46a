"""Models of earlier versions that a silo keeps: the best so far, and one whose score is still to come.

Which is the best follows from figures that silos find together (`fedsync.cipher.silo.figure_pool`), so all silos keep
the same one. Version, score and digest are in the state's digest, and with it in what silos attest to each other.

Each has a file of its own beside the silo's state, which is written before the state names it, and goes after the state
names another: whenever the process dies, what the state names is there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedsync.cipher.silo.figure_pool import number_or_none
from fedsync.common.files import OWNER_FILE, private_folder, write_pieces
from fedsync.core.orders import Score
from fedsync.evaluation.best_version import Leader, Selection
from fedsync.model.chunked_arrays import digest, file_part, map_file, pieces
from fedsync.model.layout import Vector

FOLDER = "models"
"""Beside the silo's state."""


@dataclass(frozen=True, slots=True, eq=False)
class KeptModel:
    """One of them.

    Args:
        version: of the model.
        model: float32 [values].
        digest: SHA-256 of the model, hexadecimal.
        score: of the version; None where it is still to come.
    """

    version: int
    model: Vector
    digest: str
    score: Score | None = None

    @classmethod
    def of(cls, version: int, model: Vector, score: Score | None = None) -> KeptModel:
        return cls(version, model, digest(model).hex(), score)

    def to_json(self) -> list[Any]:
        """All but the model."""
        score = self.score
        told = None if score is None else [score.version, score.accuracy, score.loss, dict(score.metrics)]
        return [self.version, self.digest, told]

    @classmethod
    def from_json(cls, value: list[Any], model: Vector) -> KeptModel:
        """The inverse of `to_json`.

        Raises:
            TypeError: it is none.
            ValueError: it is none, or of another model.
        """
        version, expected, told = value
        if digest(model).hex() != expected:
            raise ValueError(f"another model than that of version {version}")
        return cls(int(version), model, expected, None if told is None else _score(*told))

    def in_file(self, folder: Path) -> KeptModel:
        """The same with its model in a file.

        Raises:
            ConfigError: the disk does not take it.
        """
        file = file_of(folder, self.to_json())
        lies = file_part(self.model)
        if lies is None or lies.path != file:
            private_folder(folder)
            write_pieces(file, pieces(self.model), OWNER_FILE)
        return replace(self, model=map_file(file, np.float32))


def surpasses(score: Score, best: KeptModel | None, rule: Selection) -> bool:
    """Whether the model that the score is of takes the place of the best one."""
    leader = Leader()
    if best is not None and best.score is not None:
        leader = leader.after(rule, best.score, {}, ())
    return leader.after(rule, score, {}, ()).score is score


def file_of(folder: Path, kept: list[Any]) -> Path:
    """Where the model lies of which `KeptModel.to_json` said this."""
    version, expected, _ = kept
    # By the model's digest, for a version may come again, in a run that lost its newest checkpoint.
    name = hashlib.sha256(f"{int(version)} {expected}".encode()).hexdigest()
    return folder / f"{name[:32]}.bin"


def remove_others(folder: Path, kept: Iterable[KeptModel]) -> None:
    """Remove what is not kept any more."""
    if folder.is_dir():
        known = {file_of(folder, each.to_json()) for each in kept}
        for file in set(folder.iterdir()) - known:
            file.unlink(missing_ok=True)


def _score(version: Any, accuracy: Any, loss: Any, metrics: Any) -> Score:
    numbers = {str(name): float(value) for name, value in metrics.items()}
    return Score(int(version), number_or_none(accuracy), number_or_none(loss), numbers)
