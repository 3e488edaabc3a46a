"""Helpers of tests of models."""

from pathlib import Path

import numpy as np

from fedsync.model.broadcast_compression import HeldModel
from fedsync.model.layout import Vector
from fedsync.model.plain_aggregator import PlainAggregator


def vector(*values: float) -> Vector:
    return np.array(values, dtype=np.float32)


def delivered(store: PlainAggregator, silo: HeldModel, name: str, version: int) -> Vector:
    model = silo.receive(store.outgoing(name), version)
    store.holds(name, silo.version)
    return model


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.exists() else []


def no_space(*_: object, **__: object) -> None:
    """A full disk, in place of what writes."""
    raise OSError(28, "No space left on device")
