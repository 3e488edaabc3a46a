"""Partitions: divisions of one data set among silos.

Partitions by class use flwr-datasets on an in-memory table of (row, class), with FedSync's seeds and checks. Importing
flwr-datasets loads 800 modules in a second and a half, so equal shares do not use it.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsync.common.errors import ConfigError, not_installed
from fedsync.common.rng import Stream, derive_seed, generator
from fedsync.policies.schema import DataPart, Positive, PositiveInt, register

Rows = NDArray[np.int64]

DEALT = ("iid", "dirichlet", "pathological", "shards")
"""Kinds of partitions for any data."""

_SMALLEST_PART = 10
_BY_LABEL = {"partition_by": "label", "shuffle": False}


class Partition(DataPart):
    """Division of the rows of a data set among silos; equal partitions give equal divisions."""

    section = "partition"

    @abstractmethod
    def split(self, labels: NDArray[np.int64], count: int, seed: int) -> list[Rows]:
        """Sorted row numbers of each of ``count`` silos, disjoint, none empty; the run's ``seed`` determines the draw.
        ``labels`` are the classes of the rows, int64 [n]. Raises `ConfigError` if the division is impossible.
        """


@register("iid")
@dataclass(frozen=True, slots=True)
class Iid(Partition):
    """A random share of the samples for every silo."""

    def split(self, labels: NDArray[np.int64], count: int, seed: int) -> list[Rows]:
        _check_count(len(labels), count)
        return [np.sort(part) for part in np.array_split(_order(len(labels), seed), count)]


@register("dirichlet")
@dataclass(frozen=True, slots=True)
class Dirichlet(Partition):
    """Shares of classes drawn from a Dirichlet distribution.

    Every silo gets at least ten rows, or half its equal share if that is less.

    Source: Hsu et al. 2019, arXiv:1909.06335, section 3; as in flwr-datasets, without its balancing.
    """

    alpha: Positive = 0.5
    """Concentration; 0.1 is very uneven, 100 is nearly i.i.d."""

    def split(self, labels: NDArray[np.int64], count: int, seed: int) -> list[Rows]:
        _check_count(len(labels), count)
        options = {
            "alpha": float(self.alpha),
            "min_partition_size": max(1, min(_SMALLEST_PART, len(labels) // (2 * count))),
            "self_balancing": False,
            "seed": derive_seed(seed, Stream.PARTITION),
        }
        try:
            return _deal("DirichletPartitioner", labels, count, seed, **_BY_LABEL, **options)
        except ValueError as error:
            problem = f"{self.alpha} left one of {count} silos nearly without data in every one of ten draws"
            raise ConfigError("task.partition.alpha", problem, "Raise alpha, or use fewer silos") from error


@register("pathological")
@dataclass(frozen=True, slots=True)
class Pathological(Partition):
    """Only ``classes_per_silo`` classes at every silo; two, as in LB-BSP, section 5.5.

    Classes are assigned in ascending order. If ``classes_per_silo`` divides the number of classes, silo 0 gets the
    first block of classes, silo 1 the next, and so on in a cycle: 5 silos with 2 of 10 classes hold each class exactly
    once. Otherwise silo i gets the window that starts at class i. Silos that share a class get equal numbers of random
    rows. If few silos leave a class unassigned, its rows are in no part.

    Source: McMahan et al. 2017, arXiv:1602.05629, section 3; Li et al. 2021, arXiv:2102.02079.
    """

    classes_per_silo: PositiveInt = 2
    """Number of classes at each silo."""

    def split(self, labels: NDArray[np.int64], count: int, seed: int) -> list[Rows]:
        _check_count(len(labels), count)
        # flwr-datasets assigns windows that start at class i: neighbours share classes, and the last classes stay
        # unassigned. Whole blocks of classes avoid both.
        ranks = np.unique(labels, return_inverse=True)[1].astype(np.int64).reshape(-1)
        classes = int(ranks.max()) + 1
        block = self.classes_per_silo if classes % self.classes_per_silo == 0 else 1
        if self.classes_per_silo > classes:
            problem = f"{self.classes_per_silo} is more than the {classes} classes there are"
            raise ConfigError("task.partition.classes_per_silo", problem, "Write fewer")
        options = {
            "num_classes_per_partition": self.classes_per_silo // block,
            "class_assignment_mode": "deterministic",
        }
        try:
            return _deal("PathologicalPartitioner", ranks // block, count, seed, **_BY_LABEL, **options)
        except ValueError as error:
            problem = f"some classes have fewer samples than the silos that are to share them: {error}"
            raise ConfigError("task.partition.classes_per_silo", problem, "Use fewer silos") from error


@register("shards")
@dataclass(frozen=True, slots=True)
class Shards(Partition):
    """Shards of the samples, sorted by class; every silo gets several, by default two, as in PSP, section 10.6.1.

    Shards have equal size and go to random silos; the remaining rows, fewer than the number of shards, are in no part.
    A silo therefore holds few classes, mostly as many as its shards.
    """

    shards_per_silo: PositiveInt = 2
    """Number of shards at each silo."""

    def split(self, labels: NDArray[np.int64], count: int, seed: int) -> list[Rows]:
        _check_count(len(labels), count)
        if count * self.shards_per_silo > len(labels):
            problem = f"{count} silos of {self.shards_per_silo} shards are more shards than the {len(labels)} samples"
            raise ConfigError("task.partition.shards_per_silo", problem, "Write fewer, or use fewer silos")
        options = {"num_shards_per_partition": self.shards_per_silo, "seed": derive_seed(seed, Stream.PARTITION)}
        return _deal("ShardPartitioner", labels, count, seed, **_BY_LABEL, **options)


@register("natural")
@dataclass(frozen=True, slots=True)
class ByOwner(Partition):
    """Whole writers, speakers or other owners of samples for each silo; only for data that name owners.

    Owners go to random silos in nearly equal numbers.
    """

    def split(self, labels: NDArray[np.int64], count: int, seed: int) -> list[Rows]:
        owners, place = np.unique(labels, return_inverse=True)
        if len(owners) < count:
            problem = f"the samples of {len(owners)} owners are to go to {count} silos"
            raise ConfigError("task.partition", problem, "Use fewer silos")
        seats = generator(seed, Stream.PARTITION).permutation(len(owners)) % count
        silo = seats[place.reshape(-1)]
        return [np.flatnonzero(silo == index) for index in range(count)]


@register("own")
@dataclass(frozen=True, slots=True)
class Own(DataPart):
    """No distribution: every silo trains on all samples at the data's path on its own machine."""

    section = "partition"


def _deal(kind: str, labels: NDArray[np.int64], count: int, seed: int, /, **options: Any) -> list[Rows]:
    """Divide rows with a partitioner of flwr-datasets; ``labels`` may be keys of any kind."""
    try:
        import flwr_datasets.partitioner as partitioners
        from datasets import Dataset
    except ImportError as error:
        raise not_installed("task.partition", "flwr-datasets, which deals data to silos,", "sim") from error
    order = _order(len(labels), seed)
    partitioner = getattr(partitioners, kind)(num_partitions=count, **options)
    partitioner.dataset = Dataset.from_dict({"row": order, "label": labels[order]})
    with warnings.catch_warnings():
        # Warnings about repeated draws, unassigned classes and pyarrow's options; errors and docstrings cover them.
        warnings.simplefilter("ignore")
        return [np.sort(np.asarray(partitioner.load_partition(i)["row"], dtype=np.int64)) for i in range(count)]


def _order(rows: int, seed: int) -> Rows:
    """Random order in which rows are assigned; data sets are often sorted by class."""
    return generator(seed, Stream.PARTITION).permutation(rows)


def _check_count(rows: int, count: int) -> None:
    if not 1 <= count <= rows:
        problem = f"{rows} training samples cannot be dealt to {count} silos"
        raise ConfigError("task.partition", problem, "Use fewer silos")
