"""Models of earlier versions that a silo keeps: the best, and a candidate whose score is pending.

The choice of the best follows from figures that silos find together (`fedsync.cipher.silo.figure_pool`), so all silos
keep the same model. Version, score and digest are in the state's digest, and so in what silos attest to each other.

Each model has a separate file beside the silo's state. The file is written before the state names it, and removed after
the state names another. Whenever the process dies, the files that the state names exist.
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
from fedsync.evaluation.version_scores import Leader, Selection
from fedsync.model.chunked_arrays import digest, file_part, map_file, pieces
from fedsync.model.layout import Vector

FOLDER = "models"
"""Folder beside the silo's state."""


@dataclass(frozen=True, slots=True, eq=False)
class KeptModel:
    """Model of an earlier version, float32 [values], with its SHA-256 (hexadecimal); ``score`` None is pending."""

    version: int
    model: Vector
    digest: str
    score: Score | None = None

    @classmethod
    def of(cls, version: int, model: Vector, score: Score | None = None) -> KeptModel:
        return cls(version, model, digest(model).hex(), score)

    def to_json(self) -> list[Any]:
        score = self.score
        told = None if score is None else [score.version, score.accuracy, score.loss, dict(score.metrics)]
        return [self.version, self.digest, told]

    @classmethod
    def from_json(cls, value: list[Any], model: Vector) -> KeptModel:
        """Decode what `to_json` wrote; raise `TypeError` or `ValueError` if it is malformed or of another model."""
        version, expected, told = value
        if digest(model).hex() != expected:
            raise ValueError(f"another model than that of version {version}")
        return cls(int(version), model, expected, None if told is None else _score(*told))

    def in_file(self, folder: Path) -> KeptModel:
        """Store the model in a file and return a copy that maps it; raise `ConfigError` if the disk refuses."""
        file = file_of(folder, self.to_json())
        lies = file_part(self.model)
        if lies is None or lies.path != file:
            private_folder(folder)
            write_pieces(file, pieces(self.model), OWNER_FILE)
        return replace(self, model=map_file(file, np.float32))


def surpasses(score: Score, best: KeptModel | None, rule: Selection) -> bool:
    leader = Leader()
    if best is not None and best.score is not None:
        leader = leader.after(rule, best.score, {}, ())
    return leader.after(rule, score, {}, ()).score is score


def file_of(folder: Path, kept: list[Any]) -> Path:
    """File of the model that `KeptModel.to_json` described."""
    version, expected, _ = kept
    # Named by the model's digest: a version may repeat in a run that lost its newest checkpoint.
    name = hashlib.sha256(f"{int(version)} {expected}".encode()).hexdigest()
    return folder / f"{name[:32]}.bin"


def remove_others(folder: Path, kept: Iterable[KeptModel]) -> None:
    if folder.is_dir():
        known = {file_of(folder, each.to_json()) for each in kept}
        for file in set(folder.iterdir()) - known:
            file.unlink(missing_ok=True)


def _score(version: Any, accuracy: Any, loss: Any, metrics: Any) -> Score:
    numbers = {str(name): float(value) for name, value in metrics.items()}
    return Score(int(version), number_or_none(accuracy), number_or_none(loss), numbers)
