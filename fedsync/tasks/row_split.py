"""Division of a silo's rows into training, test and validation rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedsync.common.errors import ConfigError
from fedsync.common.rng import Stream, generator
from fedsync.tasks.partition import Rows

if TYPE_CHECKING:
    from fedsync.tasks.task_protocol import SiloSlot

Targets = NDArray[np.int64] | NDArray[np.float32]

_STRATA = 10


def strata_of(targets: Targets) -> NDArray[np.int64]:
    """Class of each row, or decile of its number, int64 [n]."""
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
    place, sizes = np.unique(strata_of(targets), return_inverse=True, return_counts=True)[1:]
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
