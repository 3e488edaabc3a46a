"""Data sets as arrays, and their division into one part per silo."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from fedsync.common.errors import ConfigError
from fedsync.policies.schema import DataPart
from fedsync.tasks.partition import ByOwner, Partition, Rows
from fedsync.tasks.readers.user_files import MAX_CELLS
from fedsync.tasks.row_split import Targets, strata_of, stratified

if TYPE_CHECKING:
    from torch import Tensor

    from fedsync.tasks.task_protocol import SiloSlot

Inputs = NDArray[np.float32] | NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Sparse rows as (column, value) pairs, padded with (0, 0) to the length of the longest row.

    Args:
        columns: int64 [n, longest], in ``0 .. features - 1``.
        values: float32 [n, longest].
        features: number of columns.
    """

    columns: NDArray[np.int64]
    values: NDArray[np.float32]
    features: int

    @property
    def size(self) -> int:
        return len(self.columns)

    def take(self, rows: Rows) -> Pairs:
        return Pairs(self.columns[rows], self.values[rows], self.features)

    def dense(self) -> NDArray[np.float32]:
        """All cells, float32 [n, features]; raises `ConfigError` if there are too many."""
        if self.size * self.features > MAX_CELLS // 8:
            problem = f"{self.size} rows of {self.features} features are too many to be written out in full"
            raise ConfigError("task.data", problem, "Use kind: linear without privacy, which takes them as they are")
        cells = np.zeros((self.size, self.features), dtype=np.float32)
        np.add.at(cells, (np.arange(self.size)[:, None], self.columns), self.values)
        return cells


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Inputs and targets of samples.

    Args:
        inputs: float32 [n, ...], or uint8 [n, ...] where 255 stands for 1, or sparse rows.
        targets: classes, int64 [n], or numbers, float32 [n].
        owners: owner of each sample (a writer, a speaker), int64 [n], or None if unknown.
    """

    inputs: Inputs | Pairs
    targets: Targets
    owners: NDArray[np.int64] | None = None

    def take(self, rows: Rows) -> Samples:
        inputs = self.inputs.take(rows) if isinstance(self.inputs, Pairs) else self.inputs[rows]
        return Samples(inputs, self.targets[rows], None if self.owners is None else self.owners[rows])

    def dense(self) -> Tensor:
        import torch

        cells = self.inputs.dense() if isinstance(self.inputs, Pairs) else self.inputs
        # torch warns about read-only arrays, such as views of a file's bytes.
        tensor = torch.from_numpy(np.require(cells, requirements="W"))
        return tensor.float() / 255 if tensor.dtype == torch.uint8 else tensor

    def labels(self) -> Tensor:
        import torch

        return torch.from_numpy(self.targets)


@dataclass(frozen=True, slots=True)
class DataShape:
    """Shape of data, from which a model is built.

    Args:
        inputs: shape of one sample.
        classes: number of classes, or 0 if targets are numbers.
        sparse: whether inputs are `Pairs`; ``inputs`` is then (features,).
    """

    inputs: tuple[int, ...]
    classes: int
    sparse: bool = False

    @property
    def features(self) -> int:
        return int(np.prod(self.inputs, dtype=np.int64))


class Source(DataPart):
    """Source of samples; equal sources give equal samples. ``libraries``: modules imported late that load slowly."""

    section = "data"
    libraries: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def shape(self) -> DataShape:
        """Shape of the samples; reads as little as possible. Raises `ConfigError` as `read`."""

    @abstractmethod
    def read(self) -> tuple[Samples, Samples | None]:
        """All training samples, and test samples if the source has a test split.

        Raises `ConfigError` with file, place and remedy if a file has an error.
        """

    @property
    def paths(self) -> tuple[str, ...]:
        """Keys that hold paths; a source without paths is generated, and equal at all silos."""
        return tuple(key for key in self._keys() if key in ("folder", "file", "test_file"))

    def relocated(self, locate: Callable[[str], str]) -> Self:
        given = {name: getattr(self, name) for name in self.paths}
        return replace(self, **{name: locate(path) for name, path in given.items() if path is not None})  # type: ignore[type-var]


def deal(source: Source, partition: Partition | None, test_share: float, slot: SiloSlot) -> tuple[Samples, Samples]:
    """Training and test samples of one silo; raises `ConfigError` if the division is impossible.

    With a partition, the source is divided among the silos, and all silos have the same test samples, without classes
    that no silo trains on. Without a partition, the source on this machine is the silo's own. ``test_share`` of each
    class become test samples, if the source has no test split.
    """
    if partition is None:
        train, test = source.read()
        if test is None:
            mine, kept = stratified(strata_of(train.targets), test_share, slot.seed, slot.name)
            train, test = train.take(mine), train.take(kept)
        return train, test
    parts, kept, apart = _dealt(source, partition, test_share, slot.count, slot.seed)
    whole, others = _read(source)
    return whole.take(parts[slot.index]), (others if apart and others is not None else whole).take(kept)


@lru_cache(maxsize=2)
def _read(source: Source) -> tuple[Samples, Samples | None]:
    """Read a source; cached, as a simulation asks once per silo."""
    return source.read()


@lru_cache(maxsize=4)
def _dealt(
    source: Source, partition: Partition, test_share: float, count: int, seed: int
) -> tuple[list[Rows], Rows, bool]:
    """Rows of each silo, rows of the test split, and whether the latter come from the source's own test samples."""
    train, test = _read(source)
    strata = strata_of(train.targets)
    rows, kept = np.arange(len(strata)), np.empty(0, dtype=np.int64)
    if test is None:
        rows, kept = stratified(strata, test_share, seed, "")
    parts = [rows[part] for part in partition.split(_keys(train, partition, strata)[rows], count, seed)]
    pool = train if test is None else test
    if test is not None:
        kept = np.arange(len(test.targets))
    if pool.targets.dtype == np.int64:
        held = np.unique(train.targets[np.concatenate(parts)])
        kept = kept[np.isin(pool.targets[kept], held)]
    return parts, kept, test is not None


def _keys(samples: Samples, partition: Partition, strata: NDArray[np.int64]) -> NDArray[np.int64]:
    if not isinstance(partition, ByOwner):
        return strata
    if samples.owners is None:
        problem = "the data do not say who each sample is from"
        raise ConfigError("task.partition.kind", problem, "Choose another kind of partition")
    return samples.owners
