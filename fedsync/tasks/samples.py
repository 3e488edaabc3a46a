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
from fedsync.common.rng import Stream, generator
from fedsync.policies.schema import DataPart
from fedsync.tasks.partition import ByOwner, Partition, Rows

if TYPE_CHECKING:
    from torch import Tensor

    from fedsync.tasks.task_protocol import SiloSlot

Inputs = NDArray[np.float32] | NDArray[np.uint8]
Targets = NDArray[np.int64] | NDArray[np.float32]

MAX_CELLS = 2**31
"""Limit of values in one data set; a header with a larger number is rejected."""
_STRATA = 10


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
            mine, kept = stratified(_strata(train.targets), test_share, slot.seed, slot.name)
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
    strata = _strata(train.targets)
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
        raise ConfigError(
            "task.partition.kind", "the data do not say who each sample is from", "Choose another kind of partition"
        )
    return samples.owners


def _strata(targets: Targets) -> NDArray[np.int64]:
    if targets.dtype == np.int64:
        return targets.astype(np.int64, copy=False)
    edges = np.quantile(targets, np.linspace(0, 1, _STRATA + 1)[1:-1])
    return np.searchsorted(edges, targets).astype(np.int64)


def held_out(targets: Targets, share: float | None, slot: SiloSlot) -> tuple[Rows, Rows | None]:
    """Divide a silo's training samples into sorted row numbers to train on, and to validate on.

    The validation split has the rounded share of all samples; without a share there is no split. Each class has its
    part of it, rounded up or down; numbers are divided by deciles. The run's seed and the silo's name determine the
    draw. Raises `ConfigError` if the share gives no sample, or all samples.
    """
    samples = len(targets)
    if share is None:
        return np.arange(samples), None
    wanted = round(share * samples)
    if not 0 < wanted < samples:
        problem = f"{share} of the {samples} training samples of silo {slot.name!r} is {wanted}"
        raise ConfigError("task.validation", problem, "Write a share that leaves some on both sides, or leave it out")
    place, sizes = np.unique(_strata(targets), return_inverse=True, return_counts=True)[1:]
    quotas, rests = np.divmod(sizes * wanted, samples)
    rng = generator(slot.seed, Stream.VALIDATION, slot.name)
    by_chance = rng.permutation(len(sizes))
    quotas[by_chance[np.argsort(-rests[by_chance], kind="stable")][: wanted - quotas.sum()]] += 1
    chosen = np.zeros(samples, dtype=bool)
    for stratum, quota in enumerate(quotas):
        chosen[rng.permutation(np.flatnonzero(place == stratum))[:quota]] = True
    return np.flatnonzero(~chosen), np.flatnonzero(chosen)


def by_number(samples: int, share: float, validation: float | None, slot: SiloSlot) -> tuple[Rows, Rows, Rows | None]:
    """Sorted row numbers (train, test, validation); a row's own number alone decides in which of them it is."""
    tested = generator(slot.seed, Stream.SPLIT, slot.name).random(samples) < share
    held = generator(slot.seed, Stream.VALIDATION, slot.name).random(samples) < (validation or 0.0)
    kept = None if validation is None else np.flatnonzero(~tested & held)
    return np.flatnonzero(~tested & ~held), np.flatnonzero(tested), kept


def stratified(strata: NDArray[np.int64], share: float, seed: int, name: str) -> tuple[Rows, Rows]:
    """Sorted row numbers (train, test), with the same share of each class."""
    rng = generator(seed, Stream.SPLIT, name)
    chosen = np.zeros(len(strata), dtype=bool)
    for stratum in np.unique(strata):
        rows = rng.permutation(np.flatnonzero(strata == stratum))
        chosen[rows[: round(share * len(rows))]] = True
    return np.flatnonzero(~chosen), np.flatnonzero(chosen)
