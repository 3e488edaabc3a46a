"""Synthetic tables with a known truth: blobs, sparse rows with a linear rule, and low-rank ratings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedsync.common.rng import Stream, generator
from fedsync.tasks.samples import DataShape, Pairs, Samples


@dataclass(frozen=True, slots=True)
class BlobsSource:
    """Source of points around ``blobs`` centres, float32 [n, features]; the class is the index of the centre.

    Centres are normal with deviation ``apart``, points around them with deviation 1. Blobs overlap if
    ``apart`` is 1, and hardly if it is 5. Samples alternate between blobs.
    """

    samples: int = 2000
    blobs: int = 5
    features: int = 4
    apart: float = 4.0

    def shape(self) -> DataShape:
        return DataShape((self.features,), self.blobs)

    def read(self) -> tuple[Samples, Samples | None]:
        rng = generator(0, Stream.DATA, "blobs")
        centres = rng.normal(0, self.apart, (self.blobs, self.features))
        labels = np.arange(self.samples, dtype=np.int64) % self.blobs
        points = centres[labels] + rng.normal(0, 1, (self.samples, self.features))
        return Samples(points.astype(np.float32), labels), None


@dataclass(frozen=True, slots=True)
class SparseSource:
    """Source of sparse rows with many features, like the words of an address, with a linear truth.

    The frequency of feature j is proportional to 1 / (j + 1): some features are common and most are rare. A value is
    1 / sqrt(nonzeros). In the truth vector, ``informative`` of the more common features are not zero. Targets are 1
    where ``truth * row + noise`` is above its median, or that number itself.

    Args:
        nonzeros: non-zero values per row; a feature drawn twice counts twice.
        informative: number of features with an effect.
        noise: standard deviation, in units of the truth's own deviation over the rows.
        target: ``class`` or ``number``.
    """

    samples: int = 2000
    features: int = 10_000
    nonzeros: int = 20
    informative: int = 100
    noise: float = 0.1
    target: Literal["class", "number"] = "class"

    def shape(self) -> DataShape:
        return DataShape((self.features,), 2 if self.target == "class" else 0, sparse=True)

    def read(self) -> tuple[Samples, Samples | None]:
        rng = generator(0, Stream.DATA, "sparse")
        frequency = 1 / np.arange(1, self.features + 1)
        shape = (self.samples, self.nonzeros)
        columns = rng.choice(self.features, size=shape, p=frequency / frequency.sum()).astype(np.int64)
        values = np.full(shape, 1 / np.sqrt(self.nonzeros), dtype=np.float32)
        truth = np.zeros(self.features)
        counting = min(self.informative, self.features)
        truth[rng.permutation(min(2 * counting, self.features))[:counting]] = rng.normal(0, 1, counting)
        said = (truth[columns] * values).sum(axis=1)
        said = (said - said.mean()) / max(said.std(), 1e-12) + rng.normal(0, self.noise, self.samples)
        targets = said.astype(np.float32) if self.target == "number" else (said > np.median(said)).astype(np.int64)
        return Samples(Pairs(columns, values, self.features), targets), None


@dataclass(frozen=True, slots=True)
class RatingsSource:
    """Source of users' ratings of items, float32 [users, items], NaN if unknown; targets are 0.

    A rating is the product of a user vector and an item vector of ``rank`` values, plus noise. A rating is known with
    probability ``known``; every user has at least one known rating.

    Args:
        rank: rank of the truth.
        known: share of known ratings.
        noise: standard deviation; the truth's own is 1, or 0.77 with ``non_negative``.
        non_negative: take absolute values of the vectors, and set negative ratings to 0.
    """

    users: int = 500
    items: int = 40
    rank: int = 3
    known: float = 0.5
    noise: float = 0.1
    non_negative: bool = False

    def shape(self) -> DataShape:
        return DataShape((self.items,), 1)

    def read(self) -> tuple[Samples, Samples | None]:
        rng = generator(0, Stream.DATA, "ratings")
        users, items = rng.normal(0, 1, (self.users, self.rank)), rng.normal(0, 1, (self.items, self.rank))
        if self.non_negative:
            users, items = np.abs(users), np.abs(items)
        ratings = users @ items.T / np.sqrt(self.rank) + rng.normal(0, self.noise, (self.users, self.items))
        if self.non_negative:
            ratings = np.maximum(ratings, 0)
        known = rng.random(ratings.shape) < self.known
        known[np.arange(self.users), rng.integers(self.items, size=self.users)] = True
        cells = np.where(known, ratings, np.nan).astype(np.float32)
        return Samples(cells, np.zeros(self.users, dtype=np.int64)), None
